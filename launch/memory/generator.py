"""Memory of a generator rank: live and received weights, keys and values, and the logits of sampling."""

from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.messages import Role
from launch.memory.parameters import ParameterCounts, payload_bytes
from launch.memory.shape import DecoderShape
from launch.memory.units import BYTES, MIB, Need, libraries

N_BUCKETS = 2  # receive buckets of a push
N_SAMPLED = 3  # logits of a slot and two temporaries of sampling; float64
SERVER_RANK = 500 * MIB  # each further rank of tensor parallelism
SLOT_STEP = 64  # positions; slots grow by a quarter, to a multiple of it (actors/engines/builtin/dense_cache.py)


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
