"""When faults come and of which kind: a Poisson process from a seed. Pure: no clock, no I/O."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    KILL = "kill"  # SIGKILL to an actor or engine server
    STOP = "stop"  # SIGSTOP, and SIGCONT after STOPPED_S
    CUT = "cut"  # all connections of an actor end
    RANK = "rank"  # SIGKILL to a rank, which ends the job: it is resumed


PER_KILL = {FaultKind.KILL: 1.0, FaultKind.STOP: 0.5, FaultKind.CUT: 0.5, FaultKind.RANK: 0.25}
DEFAULT = (FaultKind.KILL, FaultKind.STOP, FaultKind.CUT)
STOPPED_S = (0.5, 6.0)  # bus.silent_s is 3 s: some stops are noticed, some are not


@dataclass(frozen=True, slots=True)
class PlannedFault:
    """A fault without its victim, which depends on what runs then."""

    at_s: float  # since the first fault may come
    kind: FaultKind


def planned_faults(dice: random.Random, kinds: Sequence[FaultKind], kills_per_minute: float) -> Iterator[PlannedFault]:
    """Without end, in order of time. Each kind comes `kills_per_minute` times its PER_KILL a minute, on average."""
    weights = [PER_KILL[kind] for kind in kinds]
    at_s = 0.0
    while True:
        at_s += dice.expovariate(kills_per_minute * sum(weights) / 60)
        yield PlannedFault(at_s, dice.choices(kinds, weights)[0])


@dataclass(frozen=True, slots=True)
class AppliedFault:
    """A fault that a process has suffered."""

    kind: FaultKind
    name: str  # of the actor (generator-0.1); of a server its generator's; rank-2
    of_server: bool
    t: float  # monotonic seconds, as in the journal
    until: float  # of SIGCONT; elsewhere t

    @property
    def place(self) -> str:
        """generator-0"""
        return self.name.rpartition(".")[0] or self.name

    @property
    def incarnation(self) -> int:
        return int(self.name.rpartition(".")[2])

    @property
    def label(self) -> str:
        """kill generator, stop head, cut server, rank"""
        if self.kind is FaultKind.RANK:
            return str(self.kind)
        return f"{self.kind} {'server' if self.of_server else self.place.rpartition('-')[0]}"
