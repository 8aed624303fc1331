"""The sizes of a model, by its config.json or a known id, and what its parameters need in bytes."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.models.model_config import base_of, is_adapter_folder
from areal_bus.config.algorithms import is_url, uses_reference, uses_teacher
from areal_bus.config.sections import Config
from areal_bus.messages import Role

FOUR_NORMS = ("gemma2", "gemma3", "gemma3_text")
NORMED_HEADS = ("gemma3", "gemma3_text", "qwen3", "qwen3_moe")
OUR_MODEL_TYPES = ("llama", "mistral", "qwen2")  # areal_cpu/llama_layer.py computes their layers


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """The sizes of a decoder of the Llama and Qwen family."""

    hidden: int
    layers: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    is_ours: bool = False  # a learner of one rank in float32 on a CPU uses areal_cpu for the layers
    n_frozen: int = 0  # parameters of the reference model and the teacher, in shares on all learners
    n_norms: int = 2  # of a layer, of hidden size
    norms_heads: bool = False  # each head's queries and keys, too
    n_taught: int = 0  # of the teacher's embedding and head, which stay whole during an update (actor.distill_beta)

    @property
    def n_parameters(self) -> int:
        """Parameters without norms and biases, which are below 0.1 %."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        layer = attention + 3 * self.hidden * self.intermediate
        return self.layers * layer + self.vocabulary * self.hidden * (1 if self.tied else 2)

    @property
    def linear_layers(self) -> dict[str, tuple[int, int]]:
        """Name -> (outputs, inputs) of the linear layers of one decoder layer."""
        query, key = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (query, self.hidden),
            "k_proj": (key, self.hidden),
            "v_proj": (key, self.hidden),
            "o_proj": (self.hidden, query),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def kv_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_dim

    def activation_numbers(self, *, by_us: bool) -> tuple[int, int]:
        """Numbers that a layer keeps for the backward pass: (per row, per attended token).

        transformers' layers: norms (input, normalised; those before a projection also scaled), the input of the output
        projection; gate, its activation, up and their product; per attended token query, output, key and value.
        areal_cpu: two norms, all
        heads, the attention output, gate and up.
        """
        heads = self.head_dim * (self.heads + self.kv_heads)
        if by_us:
            return 2 * self.hidden + 2 * heads + 2 * self.intermediate, 0
        norms = (2 * self.n_norms + 2) * self.hidden + (2 * heads if self.norms_heads else 0)
        return norms + self.heads * self.head_dim + 4 * self.intermediate, 2 * heads


KNOWN_SHAPES = {  # from the published config.json of these models
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": DecoderShape(1536, 28, 8960, 12, 2, 128, 151936, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": DecoderShape(3584, 28, 18944, 28, 4, 128, 152064, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": DecoderShape(5120, 48, 13824, 40, 8, 128, 152064, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": DecoderShape(5120, 64, 27648, 40, 8, 128, 152064, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": DecoderShape(4096, 32, 14336, 32, 8, 128, 128256, False, True),
    "Qwen/Qwen2.5-0.5B-Instruct": DecoderShape(896, 24, 4864, 14, 2, 64, 151936, True, True),
    "Qwen/Qwen2.5-1.5B-Instruct": DecoderShape(1536, 28, 8960, 12, 2, 128, 151936, True, True),
    "Qwen/Qwen2.5-7B-Instruct": DecoderShape(3584, 28, 18944, 28, 4, 128, 152064, False, True),
}


def find_shape(config: Config, config_folder: Path) -> DecoderShape | None:
    """From [model.scratch], config.json or KNOWN_SHAPES; None: unknown (a frozen one counts as the policy)."""
    shape = shape_of_policy(config, config_folder)
    if shape is None:
        return None
    is_base = config.actor.lora is not None and not config.reference.path  # the policy without its adapters
    paths = [config.reference.path] if uses_reference(config.actor) and not is_base else []
    has_teacher = uses_teacher(config.actor) and not is_url(config.teacher.path)
    paths += [config.teacher.path] if has_teacher else []
    frozen = [(shape_at(path, config_folder) if path else None) or shape for path in paths]
    n_taught = root_numbers(frozen[-1]) if has_teacher and config.actor.distill_beta is not None else 0
    return replace(shape, n_frozen=sum(one.n_parameters for one in frozen), n_taught=n_taught)


def shape_of_policy(config: Config, config_folder: Path) -> DecoderShape | None:
    if (scratch := config.model.scratch) is not None:
        width = scratch.hidden_size
        head_dim = width // scratch.heads
        size = len(set(scratch.characters)) + 3
        return DecoderShape(width, scratch.layers, 4 * width, scratch.heads, scratch.heads, head_dim, size, True, True)
    return shape_at(config.model.path, config_folder)


def shape_at(path: str, config_folder: Path) -> DecoderShape | None:
    """Of a model's folder, relative to the working directory or the config's, or of a known Hugging Face id."""
    for folder in (Path(path), config_folder / path):
        if is_adapter_folder(folder):
            return shape_at(base_of(str(folder)), config_folder)
        if (folder / "config.json").is_file():
            return read_shape(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    return KNOWN_SHAPES.get(path)


def read_shape(published: dict[str, Any]) -> DecoderShape | None:
    """From the fields of a config.json; None for another model family."""
    try:
        hidden, heads, kind = published["hidden_size"], published["num_attention_heads"], published.get("model_type")
        return DecoderShape(
            hidden=hidden,
            layers=published["num_hidden_layers"],
            intermediate=published["intermediate_size"],
            heads=heads,
            kv_heads=published.get("num_key_value_heads") or heads,
            head_dim=published.get("head_dim") or hidden // heads,
            vocabulary=published["vocab_size"],
            tied=bool(published.get("tie_word_embeddings", False)),
            is_ours=kind in OUR_MODEL_TYPES,
            n_norms=4 if kind in FOUR_NORMS else 2,
            norms_heads=kind in NORMED_HEADS,
        )
    except KeyError:
        return None


def root_numbers(shape: DecoderShape) -> int:
    """Numbers outside the decoder layers: embedding and head."""
    return shape.vocabulary * shape.hidden * (1 if shape.tied else 2)


MIB, GIB = 2**20, 2**30
BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on the device and in host memory."""

    device: int
    host: int


LIBRARIES = {  # code and own allocations of libraries, torch 2.13 on CPU
    Role.HEAD: 48 * MIB,
    Role.LEARNER: 370 * MIB,
    Role.GENERATOR: 340 * MIB,
    Role.REWARD: 43 * MIB,
}
FORKED = {  # with launch.start = "fork": what an actor does not share, with page tables and kernel memory
    Role.HEAD: 32 * MIB,
    Role.LEARNER: 26 * MIB,
    Role.GENERATOR: 22 * MIB,
    Role.REWARD: 10 * MIB,
}
REWARD_WORKER = 16 * MIB  # with a reward function that imports nothing large
SUPERVISOR = 60 * MIB  # one each rank
FORK_SERVER, ATTENDANT, FORKED_SUPERVISOR = 400 * MIB, 5 * MIB, 8 * MIB  # one each host, rank, and rank with actors


def libraries(config: Config, role: Role) -> int:
    """Host memory of an actor that does not depend on the model."""
    return (FORKED if config.launch.start == "fork" else LIBRARIES)[role]


MAX_DELTA_SHARE = 0.5  # areal_bus/weights/delta.py


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of the policy by how the learner keeps them, and bytes of a push."""

    trained: int  # float32, with moments and gradients
    frozen: int  # in model.dtype
    pushed_bytes: int
    adapted: int = 0  # of the frozen ones, those of layers with adapters
    largest: int = 0  # of the weight of one adapted layer

    @staticmethod
    def of(config: Config, shape: DecoderShape) -> "ParameterCounts":
        chosen = adapted_layers(config, shape)
        if config.actor.lora is None:
            return ParameterCounts(shape.n_parameters, 0, shape.n_parameters * BYTES[config.model.dtype])
        trained = shape.layers * sum(rank * (n_out + n_in) for n_out, n_in, rank in chosen)
        if "dora" in config.actor.lora.variant:
            trained += shape.layers * sum(n_out for n_out, _, _ in chosen)
        sizes = [n_out * n_in for n_out, n_in, _ in chosen]
        return ParameterCounts(
            trained, shape.n_parameters, trained * BYTES["float32"], shape.layers * sum(sizes), max(sizes, default=0)
        )


def adapted_layers(config: Config, shape: DecoderShape) -> list[tuple[int, int, int]]:
    """(outputs, inputs, rank) of the layers of one decoder layer that have adapters."""
    lora = config.actor.lora
    if lora is None:
        return []
    wanted = lora.target_modules or tuple(shape.linear_layers)
    return [(*form, lora.form(name)[0]) for name, form in shape.linear_layers.items() if name in wanted]


def loaded_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of the policy as every learner rank loads it: float32, with adapters model.dtype."""
    return shape.n_parameters * BYTES["float32" if config.actor.lora is None else config.model.dtype]


def payload_bytes(config: Config, counts: ParameterCounts) -> int:
    """The largest payload of a delta; 0 where every push is a full one."""
    is_auto = config.weights.delta_push == "auto" and config.weights.route != "shared"
    return int(MAX_DELTA_SHARE * counts.pushed_bytes) if is_auto and config.actor.lora is None else 0
