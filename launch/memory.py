"""How much memory each rank needs, from the model's shape: a formula, not a measurement; knows no process.

A learner keeps parameters, gradients and two AdamW moments in float32 whatever model.dtype is: 16 bytes a parameter,
over all learners. One learner alone in bfloat16 also holds its parameters rounded, for the length of a pass. Learner 0
keeps two snapshots in model.dtype in host memory. Generator: (weights + keys and values of all slots at full length) /
tensor_parallel, and the weights once more where it receives, all in model.dtype. Activations, logits, layers that FSDP
gathers and buffers of libraries come on top.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from areal_bus.config import Config
from areal_bus.messages import Role

GIB = 2**30
BYTES = {"float32": 4, "bfloat16": 2}
TRAINED = 4 * BYTES["float32"]  # bytes: a parameter, its gradient and two moments
N_SNAPSHOTS = 2  # as actors/training/pushing.py keeps them


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes of a decoder of the Llama and Qwen family."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool

    @property
    def n_parameters(self) -> int:
        """Norms and biases left out: they are below a thousandth."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def kv_per_token(self) -> int:
        """Numbers that one token leaves in the cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim


KNOWN = {  # as in the config.json that these models are published with
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": Shape(1536, 28, 8960, 12, 2, 128, 151936, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": Shape(3584, 28, 18944, 28, 4, 128, 152064, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": Shape(5120, 48, 13824, 40, 8, 128, 152064, False),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": Shape(5120, 64, 27648, 40, 8, 128, 152064, False),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one rank needs on its device and in its host's memory."""

    device: int
    host: int


def find_shape(config: Config, config_folder: Path) -> Shape | None:
    """From [model.scratch], the folder's config.json or the table above; None when the shape is not known here."""
    if (scratch := config.model.scratch) is not None:
        width = scratch.hidden_size
        head_dim = width // scratch.heads
        size = len(set(scratch.characters)) + 3
        return Shape(width, scratch.layers, 4 * width, scratch.heads, scratch.heads, head_dim, size, True)
    for folder in (Path(config.model.path), config_folder / config.model.path):
        if (folder / "config.json").is_file():
            return read_shape(json.loads((folder / "config.json").read_text()))
    return KNOWN.get(config.model.path)


def read_shape(published: dict[str, int]) -> Shape | None:
    """From the fields of a config.json; None when it is of another family."""
    try:
        hidden, heads = published["hidden_size"], published["num_attention_heads"]
        return Shape(
            hidden=hidden,
            layers=published["num_hidden_layers"],
            intermediate=published["intermediate_size"],
            heads=heads,
            kv_heads=published.get("num_key_value_heads") or heads,
            head_dim=published.get("head_dim") or hidden // heads,
            vocabulary=published["vocab_size"],
            tied=bool(published.get("tie_word_embeddings", False)),
        )
    except KeyError:
        return None


def estimate(config: Config, shape: Shape, role: Role, index: int) -> Need:
    """What one actor needs on each of its ranks."""
    one = BYTES[config.model.dtype]
    weights = shape.n_parameters * one
    if role is Role.LEARNER:
        learners = config.topology.learners
        rounded = weights if learners == 1 and config.model.dtype != "float32" else 0
        return Need(TRAINED * shape.n_parameters // learners + rounded, N_SNAPSHOTS * weights if index == 0 else 0)
    if role is Role.GENERATOR:
        tokens = config.rollout.max_concurrent_rollouts * (
            config.data.max_prompt_tokens + config.gconfig.max_new_tokens
        )
        width = config.topology.tensor_parallel
        on_device = (weights + tokens * shape.kv_per_token * one) // width
        if config.weights.staging == "device":
            return Need(on_device + weights // width, 0)
        return Need(on_device, weights)
    return Need(0, 0)
