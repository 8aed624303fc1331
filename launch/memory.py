"""Estimates the peak memory of each actor from the model's shape and the settings. Pure: a formula.

A learner keeps parameters and two AdamW moments in float32 whatever model.dtype is: 12 bytes a parameter, sharded over
the learners of a copy (topology.replicas). A step adds the activations of a micro-batch and gradients (4 bytes a
parameter). With one micro-batch the larger of the two counts, with several their sum. On a CPU several ranks also keep
room for the layers that FSDP2 has gathered (`gathered`). Loading a model takes its file and a copy. Frozen models
(reference, teacher) add their weights in model.dtype, sharded, too. With actor.lora the model's own weights are frozen
as well, and 12 and 4 bytes count for the numbers of the adapters only. A generator keeps the weights twice (live and
receive buffer; with actor.lora live and base) and the KV cache of all slots at full length. The memory of libraries was
measured on CPU. With checkpoint.async_save, or on a GPU, each learner rank copies what it writes of a checkpoint to the
host.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actors.models.adapter_folder import base_of, is_adapter_folder
from areal_bus.config.algorithms import keeps_reference, uses_reference, uses_teacher
from areal_bus.config.capacity import logits_chunk
from areal_bus.config.sections import Config
from areal_bus.messages import Role
from areal_bus.weights.route import home

MIB, GIB = 2**20, 2**30
BYTES = {"float32": 4, "bfloat16": 2}
STATE_BYTES = 3 * BYTES["float32"]  # a parameter and two moments
GRADIENT_BYTES = BYTES["float32"]
SQRT_BYTES = BYTES["float32"]  # torch on a GPU computes the square roots of all second moments at once
N_SNAPSHOTS = 2  # kept by actors/learner/weight_pusher.py
N_LOADED = 2  # a model's file and its copy in memory, before training begins
N_BUCKETS = 2  # receive buckets of a push
MAX_DELTA_SHARE = 0.5  # areal_bus/weights/change_history.py
N_LOGITS = 3  # logits, softmax and gradient of a trained token; float32
N_LOGITS_PLAIN = 2  # logits and softmax, whose memory the gradient takes; see `has_plain_logits`
N_SAMPLED = 3  # logits of a slot and two temporaries of sampling; float64
SLOT_STEP = 64  # positions; slots grow by a quarter, to a multiple of it (actors/engines/builtin/dense_cache.py)
LIBRARIES = {  # code and own allocations of libraries, torch 2.13 on CPU
    Role.HEAD: 48 * MIB,
    Role.LEARNER: 370 * MIB,
    Role.GENERATOR: 340 * MIB,
    Role.REWARD: 43 * MIB,
}
FORKED = {  # with launch.start = "fork": what an actor does not share, with page tables and kernel memory
    Role.HEAD: 32 * MIB,
    Role.LEARNER: 26 * MIB,
    Role.GENERATOR: 26 * MIB,
    Role.REWARD: 12 * MIB,
}
REWARD_WORKER = 16 * MIB  # with a reward function that imports nothing large
SUPERVISOR = 60 * MIB  # one each rank
FORK_SERVER, ATTENDANT, FORKED_SUPERVISOR = 400 * MIB, 5 * MIB, 9 * MIB  # one each host, rank, and rank with actors
OUR_MODEL_TYPES = ("llama", "mistral", "qwen2")  # actors/cpu/llama_layer.py computes their layers


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
    is_ours: bool = False  # a learner of one rank in float32 on a CPU uses actors/cpu for the layers
    n_frozen: int = 0  # parameters of the reference model and the teacher, in shares on all learners

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
        """Numbers of one token in the KV cache."""
        return 2 * self.layers * self.kv_heads * self.head_dim

    def activation_numbers(self, *, by_us: bool) -> tuple[int, int]:
        """Numbers that a layer keeps for the backward pass: (per row, per attended token).

        transformers' layers: two norms (input, normalised, scaled), the input of the output projection; gate, its
        activation, up and their product; per attended token query, output, key and value. actors/cpu: two norms, all
        heads, the attention output, gate and up.
        """
        heads = self.head_dim * (self.heads + self.kv_heads)
        if by_us:
            return 2 * self.hidden + 2 * heads + 2 * self.intermediate, 0
        return 6 * self.hidden + self.heads * self.head_dim + 4 * self.intermediate, 2 * heads


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


@dataclass(frozen=True, slots=True)
class Need:
    """Bytes on the device and in host memory."""

    device: int
    host: int


def find_shape(config: Config, config_folder: Path) -> DecoderShape | None:
    """From [model.scratch], the folder's config.json or KNOWN_SHAPES; None for an unknown shape.

    A frozen model of unknown shape counts as large as the policy.
    """
    shape = shape_of_policy(config, config_folder)
    if shape is None:
        return None
    is_base = config.actor.lora is not None and not config.reference.path  # the policy without its adapters
    paths = [config.reference.path] if uses_reference(config.actor) and not is_base else []
    paths += [config.teacher.path] if uses_teacher(config.actor) else []
    frozen = [(shape_at(path, config_folder) if path else None) or shape for path in paths]
    return replace(shape, n_frozen=sum(one.n_parameters for one in frozen))


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
            return read_shape(json.loads((folder / "config.json").read_text()))
    return KNOWN_SHAPES.get(path)


def read_shape(published: dict[str, Any]) -> DecoderShape | None:
    """From the fields of a config.json; None for another model family."""
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
            is_ours=published.get("model_type") in OUR_MODEL_TYPES,
        )
    except KeyError:
        return None


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The largest micro-batch of an update, every completion at full length."""

    rows: int  # tokens that the model computes: the prompt of a group once
    seen: int  # tokens in attention: the prompt once for each sample
    wanted: int  # tokens whose logits are needed
    n: int  # micro-batches of a minibatch

    @staticmethod
    def of(config: Config, n_prompt: int) -> "MicroBatch":
        n_new, n_samples = config.gconfig.max_new_tokens, config.gconfig.n_samples
        capacity = config.learner.max_tokens_per_mb
        n_shares = config.topology.learners // config.actor.context_parallel
        n_groups = -(-config.data.batch_size // (n_shares * config.actor.ppo_n_minibatches))
        group = n_prompt + n_samples * n_new
        if group <= capacity:
            held = min(n_groups, capacity // group)
            n_sequences = held * n_samples
            n = -(-n_groups // held)
            return MicroBatch(held * group, n_sequences * (n_prompt + n_new), n_sequences * n_new, n)
        held = min(
            n_groups * n_samples, max(capacity // (n_prompt + n_new), 1)
        )  # a split group: its samples share no prompt
        rows = held * (n_prompt + n_new)
        return MicroBatch(rows, rows, held * n_new, -(-n_groups * n_samples // held))


def estimate(config: Config, shape: DecoderShape, role: Role, index: int, *, n_prompt: int) -> Need:
    """Memory of one actor on each of its ranks. `n_prompt`: tokens of the longest prompt."""
    if role is Role.LEARNER:
        return learner_need(config, shape, index, n_prompt)
    if role is Role.GENERATOR:
        return generator_need(config, shape, n_prompt)
    return Need(0, libraries(config, role) + (config.reward.workers * REWARD_WORKER if role is Role.REWARD else 0))


def n_sharers(config: Config) -> int:
    """Learner ranks that share one copy of the model."""
    return config.topology.learners // config.topology.replicas


def critic_need(config: Config, shape: DecoderShape) -> int:
    """Bytes of a critic of the policy's size on a learner rank: weights, gradients and optimizer state. 0 without one.

    Its activations are gone when the policy's are there.
    """
    if config.actor.advantage != "gae":
        return 0
    learners, sharers = config.topology.learners, n_sharers(config)
    rounded = shape.n_parameters * BYTES[config.model.dtype] if config.model.dtype != "float32" and learners == 1 else 0
    return (STATE_BYTES + GRADIENT_BYTES) * shape.n_parameters // sharers + rounded


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
        trained = shape.layers * config.actor.lora.rank * sum(n_out + n_in for n_out, n_in in chosen)
        sizes = [n_out * n_in for n_out, n_in in chosen]
        return ParameterCounts(
            trained, shape.n_parameters, trained * BYTES["float32"], shape.layers * sum(sizes), max(sizes, default=0)
        )


def adapted_layers(config: Config, shape: DecoderShape) -> list[tuple[int, int]]:
    """(outputs, inputs) of the layers of one decoder layer that have adapters."""
    if config.actor.lora is None:
        return []
    wanted = config.actor.lora.target_modules or tuple(shape.linear_layers)
    return [form for name, form in shape.linear_layers.items() if name in wanted]


def libraries(config: Config, role: Role) -> int:
    """Host memory of an actor that does not depend on the model."""
    return (FORKED if config.launch.start == "fork" else LIBRARIES)[role]


def learner_need(config: Config, shape: DecoderShape, index: int, n_prompt: int) -> Need:
    learners, sharers, one = config.topology.learners, n_sharers(config), BYTES[config.model.dtype]
    counts, batch = ParameterCounts.of(config, shape), MicroBatch.of(config, n_prompt)
    gradients, active = GRADIENT_BYTES * counts.trained // sharers, activations(config, shape, batch)
    step = gradients + active if batch.n > 1 else max(gradients + last_layer(config, shape, batch), active)
    step = max(step, gradients + saved_bytes(config, counts))
    rounded = one * counts.trained if learners == 1 and config.model.dtype != "float32" else 0
    snapshots = N_SNAPSHOTS * counts.pushed_bytes if index == 0 else 0
    changes = root_delta_bytes(config, counts) if index == 0 else 0
    offloads = config.actor.lora is not None and config.actor.lora.offload
    away = one * counts.adapted if offloads else 0  # in host memory; on the GPU the weights of one layer
    kept = (STATE_BYTES * counts.trained + one * (counts.frozen + shape.n_frozen) - away) // sharers
    kept += critic_need(config, shape) + away // shape.layers
    host = libraries(config, Role.LEARNER)
    if config.learner.simulated is not None:
        return Need(BYTES["float32"] * shape.n_parameters, host + snapshots + simulated_bytes(config, counts, index))
    host += staged_bytes(config, shape, counts)
    if config.topology.gpus_per_host == 0:
        host += snapshots + changes
        least = libraries(config, Role.LEARNER) + N_LOADED * loaded_bytes(config, shape) - host
        return Need(max(kept + rounded + gathered(config, shape) + step, least), host)
    device = kept + max(rounded + step, gradients + SQRT_BYTES * counts.trained // sharers)
    loaded = max(loaded_bytes(config, shape), one * shape.n_frozen)  # each rank loads models on the host
    place = home(config, on_gpu=True)
    if place == "device":
        return Need(device + snapshots, host + loaded)
    if place == "private" and snapshots:  # pinned memory: torch rounds it up to a power of two
        snapshots = N_SNAPSHOTS * (1 << (counts.pushed_bytes - 1).bit_length())
    return Need(device, host + max(loaded, snapshots + changes))


def loaded_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of the policy as every learner rank loads it: float32, with adapters model.dtype."""
    return shape.n_parameters * BYTES["float32" if config.actor.lora is None else config.model.dtype]


def root_numbers(shape: DecoderShape) -> int:
    """Numbers outside the decoder layers: embedding and head."""
    return shape.vocabulary * shape.hidden * (1 if shape.tied else 2)


def gathered(config: Config, shape: DecoderShape) -> int:
    """Bytes on a CPU of what FSDP2 gathers from other ranks; 0 for one rank.

    All layers: each is freed after its use, but its place in the heap lies between activations and is filled by smaller
    tensors. The root twice, since it is gathered through a buffer. Measured with SmolLM2 (docs/notes/benchmarks.md).
    """
    if config.topology.learners == 1:
        return 0
    return BYTES[config.model.dtype] * (shape.n_parameters + root_numbers(shape))


def last_layer(config: Config, shape: DecoderShape, batch: "MicroBatch") -> int:
    """Bytes beside all gradients at the end of a backward pass: a layer's activations, the embedding's gradient."""
    by_embedding = 0 if config.actor.lora is not None else shape.vocabulary * shape.hidden * GRADIENT_BYTES
    return by_embedding + layer_bytes(config, shape, batch)


def payload_bytes(config: Config, counts: ParameterCounts) -> int:
    """The largest payload of a delta; 0 where every push is a full one."""
    sends_deltas = (
        config.weights.delta_push == "auto" and config.weights.route != "shared" and config.actor.lora is None
    )
    return int(MAX_DELTA_SHARE * counts.pushed_bytes) if sends_deltas else 0


def root_delta_bytes(config: Config, counts: ParameterCounts) -> int:
    """At most: a payload, and the changes of each version as a bitmap of its numbers of two bytes."""
    payload = payload_bytes(config, counts)
    return payload + (config.weights.delta_versions * counts.pushed_bytes // 16 if payload else 0)


def staged_bytes(config: Config, shape: DecoderShape, counts: ParameterCounts) -> int:
    """Bytes of the copy of a checkpoint on a learner rank's host: moments, float32 parameters where the model's are
    rounded, the model as it is pushed, and those of a critic and of a reference model that checkpoints hold.
    """
    if not config.checkpoint.async_save and config.topology.gpus_per_host == 0:
        return 0
    is_rounded = config.actor.lora is None and config.model.dtype != "float32"
    numbers = (STATE_BYTES if is_rounded else STATE_BYTES - BYTES["float32"]) * counts.trained + counts.pushed_bytes
    if config.actor.advantage == "gae":
        numbers += STATE_BYTES * shape.n_parameters
    if keeps_reference(config) and config.actor.lora is None:
        numbers += BYTES[config.model.dtype] * shape.n_parameters
    return numbers // config.topology.learners


def saved_bytes(config: Config, counts: ParameterCounts) -> int:
    """Bytes of a rank's share of the weights while a checkpoint is written and training waits, on a CPU: gathered from
    all ranks, or rounded. 0 where they are copied in any case (`staged_bytes`), or written from where they are.
    """
    if config.checkpoint.async_save or config.topology.gpus_per_host or config.actor.lora is not None:
        return 0
    is_whole = config.topology.learners == 1 and config.model.dtype == "float32"
    return 0 if is_whole else counts.pushed_bytes // config.topology.learners


def simulated_bytes(config: Config, counts: ParameterCounts, index: int) -> int:
    """Bytes of a checkpoint of a learner without passes: there are no moments, and float32 weights are rank 0's."""
    is_rounded = config.model.dtype != "float32"
    if not (config.checkpoint.async_save or is_rounded):
        return 0
    masters = BYTES["float32"] * counts.trained if is_rounded and config.checkpoint.async_save and index == 0 else 0
    return masters + counts.pushed_bytes // config.topology.learners


def learner_activation_numbers(config: Config, shape: DecoderShape) -> tuple[int, int]:
    """`DecoderShape.activation_numbers` for the learner of these settings."""
    topology = config.topology
    is_plain = config.model.dtype == "float32" and topology.learners == 1 and topology.gpus_per_host == 0
    row, seen = shape.activation_numbers(by_us=shape.is_ours and is_plain and config.actor.lora is None)
    return row + adapter_activation_numbers(config, shape), seen


def adapter_activation_numbers(config: Config, shape: DecoderShape) -> int:
    """Numbers that the adapters of a layer keep for each row: A's output; with dropout also its input, and a byte."""
    lora, chosen = config.actor.lora, adapted_layers(config, shape)
    if lora is None:
        return 0
    inputs = sum(n_in for _, n_in in chosen) if lora.dropout else 0
    return lora.rank * len(chosen) + inputs + inputs // BYTES[config.model.dtype]


def activations(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of a micro-batch's activations and logits, and of the first gradient, that of the embedding."""
    wanted = -(-batch.wanted // config.actor.context_parallel)  # of this rank
    at_once = logits_chunk(wanted, shape.vocabulary, config.learner.max_logits_mib) or wanted
    n = N_LOGITS_PLAIN if at_once == wanted and has_plain_logits(config) else N_LOGITS
    logits = n * at_once * shape.vocabulary * BYTES["float32"]
    by_embedding = 0 if config.actor.lora is not None else shape.vocabulary * shape.hidden * GRADIENT_BYTES
    return kept_bytes(config, shape, batch) + logits + by_embedding


def has_plain_logits(config: Config) -> bool:
    """Whether the model's logits are used as they are: neither cast nor divided; the entropy has no gradient."""
    is_cast = config.model.dtype != "float32" or config.topology.gpus_per_host > 0
    return not is_cast and config.gconfig.temperature in (0.0, 1.0) and config.actor.entropy_coef == 0


def layer_bytes(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of the activations of one decoder layer on this rank."""
    width = config.actor.context_parallel
    row, seen = learner_activation_numbers(config, shape)
    attended = batch.seen * seen if width == 1 else shared_attention_numbers(config, shape, batch)
    return (-(-batch.rows // width) * row + attended) * BYTES[config.model.dtype]


def kept_bytes(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of all layers' activations; with checkpointing of each layer's input, and of one layer at a time."""
    layer = layer_bytes(config, shape, batch)
    if not config.learner.gradient_checkpointing:
        return shape.layers * layer
    rows = -(-batch.rows // config.actor.context_parallel)
    return shape.layers * rows * shape.hidden * BYTES[config.model.dtype] + layer


def shared_attention_numbers(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Numbers that attention keeps on a rank with actor.context_parallel.

    Queries and outputs of its own tokens; keys and values of the two prefixes that its two chunks see, together
    1 + 1 / 2P of the tokens (on a GPU with as many heads as queries); and what is gathered from all ranks.
    """
    width, head = config.actor.context_parallel, shape.head_dim
    key_heads = shape.heads if config.topology.gpus_per_host else shape.kv_heads
    own = -(-batch.rows // width) * 2 * shape.heads * head
    keys = batch.seen * (2 * width + 1) // (2 * width) * 2 * key_heads * head
    return own + keys + batch.rows * 2 * shape.kv_heads * head


def generator_need(config: Config, shape: DecoderShape, n_prompt: int) -> Need:
    one, width, slots = (
        BYTES[config.model.dtype],
        config.topology.tensor_parallel,
        config.rollout.max_concurrent_rollouts,
    )
    weights, counts = shape.n_parameters * one, ParameterCounts.of(config, shape)
    length = (n_prompt + config.gconfig.max_new_tokens) * 5 // 4
    positions = -(-length // SLOT_STEP) * SLOT_STEP
    sampling = N_SAMPLED * slots * shape.vocabulary * 8
    on_device = (weights + slots * positions * shape.kv_per_token * one) // width + sampling
    on_host = libraries(config, Role.GENERATOR) + N_BUCKETS * min(config.weights.bucket_mib * MIB, counts.pushed_bytes)
    on_host += payload_bytes(config, counts)
    if counts.adapted:
        return adapted_generator_need(config, counts, Need(on_device, on_host), weights)
    if config.rollout.engine == "simulated":  # it keeps only a hash of the received weights
        return Need(0, on_host + weights)
    if receives_on_device(config):
        return Need(on_device + weights // width, on_host)
    return Need(on_device, on_host + weights)


def adapted_generator_need(config: Config, counts: ParameterCounts, need: Need, weights: int) -> Need:
    """With adapters: the base of the adapted layers, what is received, and the largest layer while it is merged.

    On a GPU the model is loaded on the host first. A server's weights are merged in host memory.
    """
    base = counts.adapted * BYTES[config.model.dtype]
    merging = counts.pushed_bytes + counts.largest * BYTES["float32"]
    on_gpu = config.topology.gpus_per_host > 0
    if receives_on_device(config):
        return Need(need.device + base + merging, need.host + (weights if on_gpu else 0))
    if config.rollout.engine == "builtin" and on_gpu:  # merged on the GPU, from the host
        return Need(need.device + merging, need.host + max(base + counts.pushed_bytes, weights))
    copy = 0 if config.rollout.engine == "builtin" else weights
    return Need(need.device, need.host + copy + base + merging)


def receives_on_device(config: Config) -> bool:
    """Whether a generator's receive buffer is on the device. Weights for a server arrive in host memory."""
    staging, on_gpu = config.weights.staging, config.topology.gpus_per_host > 0
    return config.rollout.engine == "builtin" and (staging == "device" or (staging == "auto" and on_gpu))
