"""How much memory each actor needs at its peak, from the model's shape and the settings: a formula; knows no process.

A learner keeps parameters and two AdamW moments in float32 whatever model.dtype is: 12 bytes a parameter, over all
learners. In a step come the activations of a micro-batch, then gradients (4 bytes a parameter) in their place: the
greater of the two counts, or both where there are several micro-batches. A generator keeps the weights twice (live, and
where it receives), and keys and values of all slots at full length. What libraries take was measured on CPU.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.config.sections import Config
from areal_bus.messages import Role
from areal_bus.weights.route import home

MIB, GIB = 2**20, 2**30
BYTES = {"float32": 4, "bfloat16": 2}
KEPT = 3 * BYTES["float32"]  # bytes: a parameter and two moments
GRADIENT = BYTES["float32"]
ROOT = BYTES["float32"]  # of AdamW's second moments, all at once, as torch has it on a GPU
N_SNAPSHOTS = 2  # as actors/learner/weight_pusher.py keeps them
N_BUCKETS = 2  # of a push, where a member receives them
N_LOGITS = 3  # a wanted token's logits, their shares, their gradient; float32
N_SAMPLED = 3  # a slot's logits and what sampling makes of them; float64
SLOT_STEP = 64  # positions; slots grow by a quarter, to a multiple of these (actors/engines/builtin/dense_cache.py)
LIBRARIES = {  # code and what it allocates for itself, torch 2.13 on CPU
    Role.HEAD: 42 * MIB,
    Role.LEARNER: 370 * MIB,
    Role.GENERATOR: 340 * MIB,
    Role.REWARD: 43 * MIB,
}
REWARD_WORKER = 16 * MIB  # of a function that imports nothing large
SUPERVISOR = 60 * MIB  # of each rank
OURS = ("llama", "mistral", "qwen2")  # model types whose layers actors/cpu/llama_layer.py computes


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
    is_ours: bool = False  # a learner of one rank in float32 on a CPU computes such layers itself

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

    def saved(self, *, by_us: bool) -> tuple[int, int]:
        """Numbers that a layer keeps for its gradient: of a token that is read, and of one of a whole sequence.

        transformers' layers: two norms (input, normalised, scaled), what enters the output product; gate, its
        activation, up and their product; query, output, key and value of whole sequences. Ours: two norms, all heads,
        what attention saw, gate and up.
        """
        heads = self.head_dim * (self.heads + self.kv_heads)
        if by_us:
            return 2 * self.hidden + 2 * heads + 2 * self.intermediate, 0
        return 6 * self.hidden + self.heads * self.head_dim + 4 * self.intermediate, 2 * heads


KNOWN = {  # as in the config.json that these models are published with
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": DecoderShape(1536, 28, 8960, 12, 2, 128, 151936, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": DecoderShape(3584, 28, 18944, 28, 4, 128, 152064, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B": DecoderShape(5120, 48, 13824, 40, 8, 128, 152064, False, True),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B": DecoderShape(5120, 64, 27648, 40, 8, 128, 152064, False, True),
    "Qwen/Qwen2.5-0.5B-Instruct": DecoderShape(896, 24, 4864, 14, 2, 64, 151936, True, True),
    "Qwen/Qwen2.5-1.5B-Instruct": DecoderShape(1536, 28, 8960, 12, 2, 128, 151936, True, True),
}


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes that one rank needs on its device and in its host's memory."""

    device: int
    host: int


def find_shape(config: Config, config_folder: Path) -> DecoderShape | None:
    """From [model.scratch], the folder's config.json or the table above; None when the shape is not known here."""
    if (scratch := config.model.scratch) is not None:
        width = scratch.hidden_size
        head_dim = width // scratch.heads
        size = len(set(scratch.characters)) + 3
        return DecoderShape(width, scratch.layers, 4 * width, scratch.heads, scratch.heads, head_dim, size, True, True)
    for folder in (Path(config.model.path), config_folder / config.model.path):
        if (folder / "config.json").is_file():
            return read_shape(json.loads((folder / "config.json").read_text()))
    return KNOWN.get(config.model.path)


def read_shape(published: dict[str, Any]) -> DecoderShape | None:
    """From the fields of a config.json; None when it is of another family."""
    try:
        hidden, heads = published["hidden_size"], published["num_attention_heads"]
        return DecoderShape(
            hidden=hidden,
            layers=published["num_hidden_layers"],
            intermediate=published["intermediate_size"],
            heads=heads,
            kv_heads=published.get("num_key_value_heads") or heads,
            head_dim=published.get("head_dim") or hidden // heads,
            vocabulary=published["vocab_size"],
            tied=bool(published.get("tie_word_embeddings", False)),
            is_ours=published.get("model_type") in OURS,
        )
    except KeyError:
        return None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest one of an update, every completion at full length."""

    rows: int  # tokens that the model reads: a group's prompt once
    seen: int  # tokens of whole sequences, in attention
    wanted: int  # tokens whose logits are needed
    n: int  # micro-batches of a minibatch

    @staticmethod
    def of(config: Config, n_prompt: int) -> "MicroBatch":
        n_new, n_samples = config.gconfig.max_new_tokens, config.gconfig.n_samples
        capacity = config.learner.max_tokens_per_mb
        n_groups = -(-config.data.batch_size // (config.topology.learners * config.actor.ppo_n_minibatches))
        group = n_prompt + n_samples * n_new
        if group <= capacity:
            held = min(n_groups, capacity // group)
            n_sequences = held * n_samples
            n = -(-n_groups // held)
            return MicroBatch(held * group, n_sequences * (n_prompt + n_new), n_sequences * n_new, n)
        held = min(n_groups * n_samples, max(capacity // (n_prompt + n_new), 1))  # a group is apart: nothing is shared
        rows = held * (n_prompt + n_new)
        return MicroBatch(rows, rows, held * n_new, -(-n_groups * n_samples // held))


def estimate(config: Config, shape: DecoderShape, role: Role, index: int, *, n_prompt: int) -> Need:
    """What one actor needs on each of its ranks; the longest prompt has `n_prompt` tokens."""
    if role is Role.LEARNER:
        return of_learner(config, shape, index, n_prompt)
    if role is Role.GENERATOR:
        return of_generator(config, shape, n_prompt)
    return Need(0, LIBRARIES[role] + (config.reward.workers * REWARD_WORKER if role is Role.REWARD else 0))


def of_learner(config: Config, shape: DecoderShape, index: int, n_prompt: int) -> Need:
    learners, one = config.topology.learners, BYTES[config.model.dtype]
    weights = shape.n_parameters * one
    batch = MicroBatch.of(config, n_prompt)
    gradients, passing = GRADIENT * shape.n_parameters // learners, activations(config, shape, batch)
    step = gradients + passing if batch.n > 1 else max(gradients, passing)
    rounded = weights if learners == 1 and config.model.dtype != "float32" else 0
    snapshots = N_SNAPSHOTS * weights if index == 0 else 0
    kept, host = KEPT * shape.n_parameters // learners, LIBRARIES[Role.LEARNER]
    if config.topology.gpus_per_host == 0:
        return Need(kept + rounded + step, host + snapshots)
    device = kept + max(rounded + step, gradients + ROOT * shape.n_parameters // learners)
    loaded = BYTES["float32"] * shape.n_parameters  # by each rank, before it goes to the GPU
    lies = home(config, on_gpu=True)
    if lies == "device":
        return Need(device + snapshots, host + loaded)
    if lies == "private" and snapshots:  # pinned, of which torch takes a power of two
        snapshots = N_SNAPSHOTS * (1 << (weights - 1).bit_length())
    return Need(device, host + max(loaded, snapshots))


def saved(config: Config, shape: DecoderShape) -> tuple[int, int]:
    """As `DecoderShape.saved`, by the learner that these settings make."""
    topology = config.topology
    is_plain = config.model.dtype == "float32" and topology.learners == 1 and topology.gpus_per_host == 0
    return shape.saved(by_us=shape.is_ours and is_plain)


def activations(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """What a micro-batch leaves for its gradients, its logits and the first gradient: that of the embedding."""
    one = BYTES[config.model.dtype]
    row, seen = saved(config, shape)
    layer = (batch.rows * row + batch.seen * seen) * one
    kept = shape.layers * layer
    if config.learner.gradient_checkpointing:  # a layer's input, and one layer at a time
        kept = shape.layers * batch.rows * shape.hidden * one + layer
    logits = N_LOGITS * batch.wanted * shape.vocabulary * BYTES["float32"]
    return kept + logits + shape.vocabulary * shape.hidden * GRADIENT


def of_generator(config: Config, shape: DecoderShape, n_prompt: int) -> Need:
    one, width, slots = (
        BYTES[config.model.dtype],
        config.topology.tensor_parallel,
        config.rollout.max_concurrent_rollouts,
    )
    weights = shape.n_parameters * one
    length = (n_prompt + config.gconfig.max_new_tokens) * 5 // 4
    positions = -(-length // SLOT_STEP) * SLOT_STEP
    sampling = N_SAMPLED * slots * shape.vocabulary * 8
    on_device = (weights + slots * positions * shape.kv_per_token * one) // width + sampling
    on_host = LIBRARIES[Role.GENERATOR] + N_BUCKETS * min(config.weights.bucket_mib * MIB, weights)
    if config.rollout.engine == "simulated":  # of what it has received it keeps a hash
        return Need(0, on_host + weights)
    if receives_on_device(config):
        return Need(on_device + weights // width, on_host)
    return Need(on_device, on_host + weights)


def receives_on_device(config: Config) -> bool:
    """Where a generator's second set of weights lies; what is for a server comes down in host memory."""
    staging, on_gpu = config.weights.staging, config.topology.gpus_per_host > 0
    return config.rollout.engine == "builtin" and (staging == "device" or (staging == "auto" and on_gpu))
