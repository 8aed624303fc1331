"""Bytes of parameters, of numbers, of a need on the device and in host memory, and of processes whatever the model.

Parameters of the policy are counted by how a learner keeps them, and by what a push sends of them.
"""

from dataclasses import dataclass

from areal_bus.config.sections import Config
from areal_bus.messages import Role
from launch.memory.shape import DecoderShape

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


def loaded_bytes(config: Config, shape: DecoderShape) -> int:
    """Bytes of the policy as every learner rank loads it: float32, with adapters model.dtype."""
    return shape.n_parameters * BYTES["float32" if config.actor.lora is None else config.model.dtype]


def payload_bytes(config: Config, counts: ParameterCounts) -> int:
    """The largest payload of a delta; 0 where every push is a full one."""
    sends_deltas = (
        config.weights.delta_push == "auto" and config.weights.route != "shared" and config.actor.lora is None
    )
    return int(MAX_DELTA_SHARE * counts.pushed_bytes) if sends_deltas else 0
