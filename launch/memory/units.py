"""Bytes of numbers, of a need on the device and in host memory, and of processes whatever the model."""

from dataclasses import dataclass

from areal_bus.config.sections import Config
from areal_bus.messages import Role

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
