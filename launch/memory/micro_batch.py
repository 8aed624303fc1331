"""The largest micro-batch of an update, and what its forward and backward pass keep."""

from dataclasses import dataclass

from areal_bus.config.capacity import LOGITS_MIB, logits_chunk
from areal_bus.config.sections import Config
from launch.memory.parameters import BYTES, adapted_layers
from launch.memory.shape import DecoderShape

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
        held = min(
            n_groups * n_samples, max(capacity // (n_prompt + n_new), 1)
        )  # a split group: its samples share no prompt
        rows = held * (n_prompt + n_new)
        return MicroBatch(rows, rows, held * n_new, -(-n_groups * n_samples // held))


def activations(config: Config, shape: DecoderShape, batch: MicroBatch) -> int:
    """Bytes of a micro-batch's activations and logits, and of the first gradient, that of the embedding."""
    wanted = -(-batch.wanted // config.actor.context_parallel)  # of this rank
    at_once = logits_chunk(wanted, shape.vocabulary, LOGITS_MIB) or wanted
    n = N_LOGITS_PLAIN if at_once == wanted and has_plain_logits(config) else N_LOGITS
    logits = n * at_once * shape.vocabulary * BYTES["float32"]
    by_embedding = 0 if config.actor.lora is not None else shape.vocabulary * shape.hidden * GRADIENT_BYTES
    return kept_bytes(config, shape, batch) + logits + by_embedding


def has_plain_logits(config: Config) -> bool:
    """Whether the model's logits are used as they are: neither cast nor divided; the entropy has no gradient."""
    is_cast = config.model.dtype != "float32" or config.topology.gpus_per_host > 0
    return not is_cast and config.gconfig.temperature in (0.0, 1.0) and config.actor.entropy_coef == 0


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
    by_embedding = 0 if config.actor.lora is not None else shape.vocabulary * shape.hidden * GRADIENT_BYTES
    return by_embedding + layer_bytes(config, shape, batch)


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
