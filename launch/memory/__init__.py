"""Estimates the peak memory of each actor from the model's shape and the settings. Pure: a formula.

A learner keeps parameters and two AdamW moments in float32 whatever model.dtype is: 12 bytes a parameter (with another
actor.optimizer 4 to 10), sharded over the learners of a copy (topology.replicas). A step adds the activations of a
micro-batch and gradients (4 bytes a parameter). With one micro-batch the larger of the two counts, with several their
sum. On a CPU several ranks also keep room for the layers that FSDP2 has gathered (`gathered`). Loading a model takes
its file and a copy. Frozen models (reference, teacher) add their weights in model.dtype, sharded, too. With actor.lora
the model's own weights are frozen as well, and 12 and 4 bytes count for the numbers of the adapters only. A generator
keeps the weights twice (live and receive buffer; with actor.lora live and base) and the KV cache of all slots at full
length. The memory of libraries was measured on CPU. With checkpoint.async_save, or on a GPU, each learner rank copies
what it writes of a checkpoint to the host.

Begin with `ranks.py`.
"""

from areal_bus.config.sections import Config
from areal_bus.messages import Role
from launch.memory.ranks import (
    N_LOGITS,
    MicroBatch,
    activations,
    fsdp_bytes,
    generator_need,
    layer_bytes,
    learner_activation_numbers,
    learner_need,
    receives_on_device,
    saved_bytes,
)
from launch.memory.shape import (
    ATTENDANT,
    BYTES,
    FORK_SERVER,
    FORKED_SUPERVISOR,
    GIB,
    KNOWN_SHAPES,
    LIBRARIES,
    MAX_DELTA_SHARE,
    MIB,
    REWARD_WORKER,
    SUPERVISOR,
    DecoderShape,
    Need,
    ParameterCounts,
    find_shape,
    libraries,
    read_shape,
    root_numbers,
)

__all__ = [
    "ATTENDANT",
    "BYTES",
    "FORKED_SUPERVISOR",
    "FORK_SERVER",
    "GIB",
    "KNOWN_SHAPES",
    "LIBRARIES",
    "MAX_DELTA_SHARE",
    "MIB",
    "N_LOGITS",
    "REWARD_WORKER",
    "SUPERVISOR",
    "DecoderShape",
    "MicroBatch",
    "Need",
    "ParameterCounts",
    "activations",
    "estimate",
    "find_shape",
    "fsdp_bytes",
    "layer_bytes",
    "learner_activation_numbers",
    "read_shape",
    "receives_on_device",
    "root_numbers",
    "saved_bytes",
]


def estimate(config: Config, shape: DecoderShape, role: Role, index: int, *, n_prompt: int) -> Need:
    """Memory of one actor on each of its ranks. `n_prompt`: tokens of the longest prompt."""
    if role is Role.LEARNER:
        return learner_need(config, shape, index, n_prompt)
    if role is Role.GENERATOR:
        return generator_need(config, shape, n_prompt)
    return Need(0, libraries(config, role) + (config.reward.workers * REWARD_WORKER if role is Role.REWARD else 0))
