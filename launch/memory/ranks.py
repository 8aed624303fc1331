"""Memory of a learner (weights, optimizer, step, checkpoints, pushes) and of a generator (weights, cache, logits)."""

from dataclasses import dataclass

from areal_bus.config.algorithms import keeps_reference
from areal_bus.config.capacity import BUCKET_BYTES, DELTA_VERSIONS, LOGITS_MIB, NF4_BYTES, TEACHER_COPIES, logits_chunk
from areal_bus.config.names.engines import NumberFormats, kind_of
from areal_bus.config.rollout import n_versions, prefix_share
from areal_bus.config.sections import Config
from areal_bus.messages import Role
from areal_bus.weights.route import home
from launch.memory.shape import (
    BYTES,
    MIB,
    REWARD_WORKER,
    DecoderShape,
    Need,
    ParameterCounts,
    adapted_layers,
    libraries,
    loaded_bytes,
    payload_bytes,
    root_numbers,
)

GRADIENT_BYTES = BYTES["float32"]
N_LOGITS = 3  # logits, softmax and gradient of a trained token; float32
N_LOGITS_PLAIN = 2  # logits and softmax, whose memory the gradient takes; see `has_plain_logits`


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
        one = n_prompt + n_new  # a split group: its samples share no prompt
        held = min(n_groups * n_samples, max(capacity // one, 1))
        rows = held * one
        return MicroBatch(rows, rows, held * n_new, -(-n_groups * n_samples // held))


def activations(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of a micro-batch's activations and logits, and of the first gradient, that of the embedding."""
    wanted = -(-batch.wanted // config.actor.context_parallel)  # of this rank
    vocabulary = shape.vocabulary * (1 if config.actor.distill_beta is None else TEACHER_COPIES)
    at_once = logits_chunk(wanted, vocabulary, LOGITS_MIB) or wanted
    n = N_LOGITS_PLAIN if at_once == wanted and has_plain_logits(config) else N_LOGITS
    logits = n * at_once * vocabulary * BYTES["float32"]
    return kept_bytes(config, shape, batch) + logits + embedding_gradient(config, shape) + dora_bytes(config, shape)


def embedding_gradient(config: Config, shape: DecoderShape) -> int:
    return 0 if config.actor.lora is not None else shape.vocabulary * shape.hidden * GRADIENT_BYTES


def dora_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes while a pass computes the row norms of the largest layer: peft multiplies the adapters by an identity."""
    lora = config.actor.lora
    if lora is None or "dora" not in lora.variant:
        return 0
    return FLOAT * max(n_in * n_in + 3 * n_out * n_in for n_out, n_in, _ in adapted_layers(config, shape))


def has_plain_logits(config: Config) -> bool:
    """Whether the model's logits are used as they are: neither cast nor divided; the entropy has no gradient."""
    is_cast = config.model.dtype != "float32" or config.topology.gpus_per_host > 0
    heats = {config.gconfig.temperature, *(source.gconfig.temperature or 1.0 for source in config.data.source)}
    return not is_cast and heats <= {0.0, 1.0} and config.actor.entropy_coef == 0 and config.actor.distill_beta is None


def kept_bytes(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of all layers' activations; with checkpointing of each layer's input, and of one layer at a time."""
    layer = layer_bytes(config, shape, batch)
    if not config.learner.gradient_checkpointing:
        return shape.layers * layer
    rows = -(-batch.rows // config.actor.context_parallel)
    return shape.layers * rows * shape.hidden * BYTES[config.model.dtype] + layer


def layer_bytes(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of the activations of one decoder layer on this rank."""
    width = config.actor.context_parallel
    row, seen = learner_activation_numbers(config, shape)
    attended = batch.seen * seen if width == 1 else shared_attention_numbers(config, shape, batch)
    return (-(-batch.rows // width) * row + attended) * BYTES[config.model.dtype]


def last_layer(config: Config, shape: DecoderShape, batch: "MicroBatch") -> int:
    """Bytes beside all gradients at the end of a backward pass: a layer's activations, the embedding's gradient."""
    return embedding_gradient(config, shape) + layer_bytes(config, shape, batch)


def learner_activation_numbers(config: Config, shape: DecoderShape) -> tuple[int, int]:
    topology = config.topology
    is_plain = config.model.dtype == "float32" and topology.learners == 1 and topology.gpus_per_host == 0
    row, seen = shape.activation_numbers(by_us=shape.is_ours and is_plain and config.actor.lora is None)
    return row + adapter_activation_numbers(config, shape), seen


def adapter_activation_numbers(config: Config, shape: DecoderShape) -> int:
    """Numbers that the adapters of a layer keep for each row: A's output; with dropout also its input, and a byte; of
    DoRA the outputs of both branches.
    """
    lora, chosen = config.actor.lora, adapted_layers(config, shape)
    if lora is None:
        return 0
    inputs = sum(n_in for _, n_in, _ in chosen) if lora.dropout else 0
    outputs = 2 * sum(n_out for n_out, _, _ in chosen) if "dora" in lora.variant else 0
    return sum(rank for _, _, rank in chosen) + outputs + inputs + inputs // BYTES[config.model.dtype]


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


STATE_BYTES = 3 * BYTES["float32"]  # a parameter and two moments
FLOAT = BYTES["float32"]
SQRT_BYTES = BYTES["float32"]  # torch on a GPU computes the square roots of all second moments at once
BLOCK = 256  # numbers with a common scale in the 8-bit states of torchao
UNPACKED_BYTES = 14  # a number of a 4-bit weight while it is made: codes (uint8, int32), value (float32), result
N_COPIES = 2  # of actors/learner/checkpoint/memory_copy.py
N_SNAPSHOTS = 2  # kept by actors/learner/link/weight_pusher.py
N_LOADED = 2  # a model's file and its copy in memory, before training begins


def learner_need(config: Config, shape: DecoderShape, index: int, n_prompt: int) -> Need:
    learners, sharers, one = config.topology.learners, n_sharers(config), BYTES[config.model.dtype]
    counts, batch = ParameterCounts.of(config, shape), MicroBatch.of(config, n_prompt)
    gradients, active = GRADIENT_BYTES * counts.trained // sharers, activations(config, shape, batch)
    step = gradients + active if batch.n > 1 else max(gradients + last_layer(config, shape, batch), active)
    step = max(step, gradients + max(saved_bytes(config, counts), muon_bytes(config, shape)))
    step += one * shape.n_taught * (sharers - 1) // sharers
    rounded = one * counts.trained if learners == 1 and config.model.dtype != "float32" else 0
    snapshots = N_SNAPSHOTS * counts.pushed_bytes if index == 0 else 0
    changes = root_delta_bytes(config, counts) if index == 0 else 0
    is_away = config.actor.offload == "base"
    away = one * counts.adapted if is_away else 0  # in host memory; on the GPU the weights of one layer
    kept = FLOAT * counts.trained + moment_bytes(config, shape, counts) + one * (counts.frozen + shape.n_frozen)
    kept = (kept - away) // sharers
    if config.actor.lora is not None and "nf4" in config.actor.lora.variant:
        kept -= int((one - NF4_BYTES) * counts.adapted)
        step += UNPACKED_BYTES * counts.largest
    kept += critic_need(config, shape) + away // shape.layers
    host = libraries(config, Role.LEARNER)
    if config.learner.simulated is not None:
        return Need(BYTES["float32"] * shape.n_parameters, host + snapshots + simulated_bytes(config, counts, index))
    host += staged_bytes(config, shape, counts)
    if config.topology.gpus_per_host == 0:
        host += snapshots + changes
        least = libraries(config, Role.LEARNER) + N_LOADED * loaded_bytes(config, shape) - host
        return Need(max(kept + rounded + gathered(config, shape) + step, least), host)
    kept, moved, in_step = offloaded(config, shape, counts, kept)
    host += moved
    if config.actor.offload == "all":
        device = kept + active
    else:
        device = kept + max(rounded + step, gradients + in_step + sqrt_bytes(config, shape, counts) // sharers)
    loaded = max(loaded_bytes(config, shape), one * shape.n_frozen)  # each rank loads models on the host
    place = home(config, on_gpu=True)
    if place == "device":
        return Need(device + snapshots, host + loaded)
    if place == "private" and snapshots:  # pinned memory: torch rounds it up to a power of two
        snapshots = N_SNAPSHOTS * (1 << (counts.pushed_bytes - 1).bit_length())
    return Need(device, host + max(loaded, snapshots + changes))


def by_muon(config: Config, shape: DecoderShape, counts: ParameterCounts) -> int:
    """Trained numbers that Muon updates: all but embeddings and head; 0 for another optimizer."""
    if config.actor.optimizer != "muon":
        return 0
    return counts.trained if config.actor.lora is not None else counts.trained - root_numbers(shape)


def moment_bytes(config: Config, shape: DecoderShape, counts: ParameterCounts, *, in_float32: bool = False) -> int:
    """Bytes of the policy's optimizer state; a user's counts as AdamW; 8-bit states are float32 in checkpoints."""
    if config.actor.optimizer == "sgd":
        return 0
    if config.actor.optimizer == "adamw8bit" and not in_float32:
        return 2 * counts.trained + 2 * counts.trained * FLOAT // BLOCK
    return FLOAT * (2 * counts.trained - by_muon(config, shape, counts))


def sqrt_bytes(config: Config, shape: DecoderShape, counts: ParameterCounts) -> int:
    """Bytes of the square roots of torch's AdamW on a GPU: others go parameter by parameter."""
    if config.actor.optimizer in ("sgd", "adamw8bit"):
        return 0
    return SQRT_BYTES * (counts.trained - by_muon(config, shape, counts))


def muon_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of a Muon step of the largest matrix, whole on each rank: 3 in float32, 4 in bfloat16."""
    if config.actor.optimizer != "muon":
        return 0
    largest = max(n_out * n_in for n_out, n_in in shape.linear_layers.values())
    return (3 * FLOAT + 4 * BYTES["bfloat16"]) * largest


def n_sharers(config: Config) -> int:
    """Learner ranks that share one copy of the model."""
    return config.topology.learners // config.topology.replicas


def offloaded(config: Config, shape: DecoderShape, counts: ParameterCounts, kept: int) -> tuple[int, int, int]:
    """(bytes that stay of `kept` on the GPU, bytes on the host instead, states on the GPU in a step)."""
    kind, sharers = config.actor.offload, n_sharers(config)
    critic = shape.n_parameters if config.actor.advantage == "gae" else 0
    moments, of_critic = moment_bytes(config, shape, counts) // sharers, 2 * FLOAT * critic // sharers
    if kind in ("none", "base"):
        return kept, 0, 0
    if kind == "optimizer":
        moved = moments + of_critic
        return kept - moved, moved, max(moments, of_critic)
    frozen = BYTES[config.model.dtype] * shape.n_frozen // sharers  # reference and teacher stay
    gathered = fsdp_bytes(config, shape) if config.topology.learners == 1 else 0  # else `gpu_overhead` has them
    return frozen + gathered, kept - frozen + GRADIENT_BYTES * counts.trained // sharers, 0


def fsdp_bytes(config: Config, shape: DecoderShape) -> int:
    """Layers that FSDP2 gathers at the peak, with the logits: embedding, head and two layers, without gradients."""
    one, root = BYTES[config.model.dtype], root_numbers(shape)
    return one * (root + 2 * ((shape.n_parameters - root) // shape.layers))


def critic_need(config: Config, shape: DecoderShape) -> int:
    """Bytes of a critic of the policy's size on a rank: weights, gradients, optimizer. 0 without one."""
    if config.actor.advantage != "gae":
        return 0
    learners, sharers = config.topology.learners, n_sharers(config)
    rounded = shape.n_parameters * BYTES[config.model.dtype] if config.model.dtype != "float32" and learners == 1 else 0
    return (STATE_BYTES + GRADIENT_BYTES) * shape.n_parameters // sharers + rounded


def gathered(config: Config, shape: DecoderShape) -> int:
    """Bytes on a CPU of what FSDP2 gathers from other ranks; 0 for one rank.

    All layers: each is freed after its use, but its place in the heap lies between activations and is filled by smaller
    tensors. The root twice, since it is gathered through a buffer. Measured with SmolLM2 (docs/notes/benchmarks.md).
    """
    if config.topology.learners == 1:
        return 0
    return BYTES[config.model.dtype] * (shape.n_parameters + root_numbers(shape))


def root_delta_bytes(config: Config, counts: ParameterCounts) -> int:
    """At most: a payload, and the changes of each version as a bitmap of its numbers of two bytes."""
    payload = payload_bytes(config, counts)
    return payload + (DELTA_VERSIONS * counts.pushed_bytes // 16 if payload else 0)


def staged_bytes(config: Config, shape: DecoderShape, counts: ParameterCounts) -> int:
    """Bytes of a checkpoint's copy on a learner's host: moments, masters, the pushed model, critic, reference."""
    if not config.checkpoint.async_save and config.topology.gpus_per_host == 0:
        return 0
    is_rounded = config.actor.lora is None and config.model.dtype != "float32"
    numbers = state_bytes(config, shape, counts) + counts.pushed_bytes + (FLOAT * counts.trained if is_rounded else 0)
    return numbers // config.topology.learners


def state_bytes(config: Config, shape: DecoderShape, counts: ParameterCounts) -> int:
    """Bytes of moments, critic and reference in a checkpoint."""
    critic = STATE_BYTES * shape.n_parameters if config.actor.advantage == "gae" else 0
    has_reference = keeps_reference(config) and config.actor.lora is None
    reference = BYTES[config.model.dtype] * shape.n_parameters if has_reference else 0
    return moment_bytes(config, shape, counts, in_float32=True) + critic + reference


def copied_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of both copies of a learner rank's state in memory: parameters, moments, critic, reference."""
    counts, sharers = ParameterCounts.of(config, shape), n_sharers(config)
    if config.learner.simulated is not None:
        return N_COPIES * FLOAT * counts.trained // sharers
    return N_COPIES * (FLOAT * counts.trained + state_bytes(config, shape, counts)) // sharers


def saved_bytes(config: Config, counts: ParameterCounts) -> int:
    """Bytes of a rank's weights while training waits for a checkpoint on a CPU; 0 where they are copied anyway."""
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


N_BUCKETS = 2  # receive buckets of a push
N_SAMPLED = 3  # logits of a slot and two temporaries of sampling; float64
SERVER_RANK = 500 * MIB  # each further rank of tensor parallelism
SLOT_STEP = 64  # positions; slots grow by a quarter, to a multiple of it (actors/engines/builtin/dense_cache.py)


def generator_need(config: Config, shape: DecoderShape, n_prompt: int) -> Need:
    one, width = BYTES[config.model.dtype], config.topology.tensor_parallel
    slots, most = config.rollout.max_concurrent_rollouts, n_prompt + config.gconfig.max_new_tokens
    weights, counts = shape.n_parameters * one, ParameterCounts.of(config, shape)
    positions = -(-(most * 5 // 4) // SLOT_STEP) * SLOT_STEP
    sampling = N_SAMPLED * slots * shape.vocabulary * 8
    kept = 0.0 if config.has_plain_prompts else prefix_share(config)  # else it fills what the slots leave free
    prefixes = int(kept * slots * most)
    served = NumberFormats.of_arguments(config.engine.arguments)
    held = weights - (shape.n_parameters - root_numbers(shape)) * (one - served.bytes_of("weights", one))
    of_version = (held + (slots * positions + prefixes) * shape.kv_per_token * served.bytes_of("cache", one)) // width
    on_device = n_versions(config.rollout) * of_version + sampling
    on_host = libraries(config, Role.GENERATOR) + N_BUCKETS * min(BUCKET_BYTES, counts.pushed_bytes)
    on_host += payload_bytes(config, counts) + server_bytes(config, weights)
    if counts.adapted:
        return adapted_generator_need(config, counts, Need(on_device, on_host), weights)
    if kind_of(config.rollout.engine).makes_up_tokens:  # it keeps only a hash of the received weights
        return Need(0, on_host + weights)
    if receives_on_device(config):
        return Need(on_device + weights // width, on_host)
    return Need(on_device, on_host + weights)


def server_bytes(config: Config, weights: int) -> int:
    """Host memory of an engine server: its processes, if this job starts it, and weights on their way to it."""
    kind, width = kind_of(config.rollout.engine), config.topology.tensor_parallel
    if not kind.is_server:
        return 0
    own = 0 if config.engine.urls else kind.process_bytes + (width - 1) * SERVER_RANK
    return own + (weights if kind.copies_weights else 0)  # in /dev/shm, also with merged adapters


def adapted_generator_need(config: Config, counts: ParameterCounts, need: Need, weights: int) -> Need:
    """With adapters: the base of the adapted layers, what is received, and the largest layer while it is merged.

    On a GPU the model is loaded on the host first. A server's weights are merged in host memory.
    """
    base = counts.adapted * BYTES[config.model.dtype]
    merging = counts.pushed_bytes + counts.largest * BYTES["float32"]
    on_gpu = config.topology.gpus_per_host > 0
    if receives_on_device(config):
        return Need(need.device + base + merging, need.host + (weights if on_gpu else 0))
    on_device = kind_of(config.rollout.engine).on_device
    if on_device and on_gpu:  # merged on the GPU, from the host
        return Need(need.device + merging, need.host + max(base + counts.pushed_bytes, weights))
    copy = 0 if on_device else weights
    return Need(need.device, need.host + copy + base + merging)


def receives_on_device(config: Config) -> bool:
    """Whether a generator's receive buffer is on the device. Weights for a server arrive in host memory."""
    staging, on_gpu = config.weights.staging, config.topology.gpus_per_host > 0
    return kind_of(config.rollout.engine).on_device and (staging == "device" or (staging == "auto" and on_gpu))


def estimate(config: Config, shape: DecoderShape, role: Role, index: int, *, n_prompt: int) -> Need:
    """Memory of one actor on each of its ranks. `n_prompt`: tokens of the longest prompt."""
    if role is Role.LEARNER:
        return learner_need(config, shape, index, n_prompt)
    if role is Role.GENERATOR:
        return generator_need(config, shape, n_prompt)
    return Need(0, libraries(config, role) + (config.reward.workers * REWARD_WORKER if role is Role.REWARD else 0))
