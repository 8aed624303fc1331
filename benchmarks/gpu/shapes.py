"""Model shapes of the bench, and what a card could do at best: operations of a training token, bytes of a step."""

from dataclasses import dataclass
from typing import Any

from launch.memory.shape import KNOWN_SHAPES, DecoderShape

SHAPES = {
    "tiny": DecoderShape(64, 2, 128, 4, 2, 16, 512, tied=True),  # to test the bench
    "0.5b": KNOWN_SHAPES["Qwen/Qwen2.5-0.5B-Instruct"],
    "1.5b": KNOWN_SHAPES["Qwen/Qwen2.5-1.5B-Instruct"],
}
# bfloat16 without sparsity in TFLOP/s, and memory in TB/s: the makers' data sheets of the SXM cards, L4 and RTX 4090.
PEAKS = {
    "H200": (989.0, 4.8), "H100": (989.0, 3.35), "A100": (312.0, 2.04), "L4": (121.0, 0.3), "4090": (165.0, 1.01),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Card:
    """Rates of a device: of the data sheet if its name is known, else those that `work.rates` measured."""

    name: str
    flops: float  # a second
    bandwidth: float  # bytes a second
    source: str  # "data sheet" or "measured"


def card_of(name: str, measured: tuple[float, float]) -> Card:
    for known, (tera, terabytes) in PEAKS.items():
        if known in name:
            return Card(name, tera * 1e12, terabytes * 1e12, "data sheet")
    return Card(name, *measured, "measured")


def training_flops(shape: DecoderShape, length: float) -> float:
    """Operations of one token in forward and backward: 6 a parameter, and 12 * layers * width * length / 2 of causal
    attention (PaLM, arXiv 2204.02311, appendix B, counts the full square). The head counts, the embedding look-up does
    not: tied, they are the same parameters. Neither recomputation nor the pass for proximal log-probs counts.
    """
    return 6.0 * shape.n_parameters + 6.0 * shape.layers * shape.heads * shape.head_dim * length


def decode_bound(shape: DecoderShape, card: Card, n_live: int, context: float, n_bytes: int) -> float:
    """Tokens a second if a step only read all weights once, and the keys and values of all live samples."""
    read = n_bytes * (shape.n_parameters + n_live * context * shape.kv_per_token)
    return n_live * card.bandwidth / read


def config_json(shape: DecoderShape, max_positions: int) -> dict[str, Any]:
    """The config.json of a model of this shape."""
    return {
        "model_type": "qwen2",
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": True,
    }
