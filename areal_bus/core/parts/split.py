"""The split of ranks between learners and generators, and the pool of ranks that may change their role. Pure: no I/O.

The learners of the pool's smallest split always learn. Further learner ranks take the place of the last generators:
with generators of `width` ranks, generator G - 1 makes room for `width` learner ranks, then generator G - 2, and so on.
So the indices of both roles have no gaps in any split. docs/adapt.md describes a change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from areal_bus.messages import Role

N_NAMED = 3  # of a kind, in a sentence


@dataclass(frozen=True, slots=True)
class Split:
    """How many ranks learn and how many generators sample."""

    learners: int
    generators: int  # of the job; guests come on top
    number: int = 0  # incremented with every change of a run
    since: int = 0  # the version at which it began

    def __str__(self) -> str:
        return f"{count(self.learners, 'learner')}, {count(self.generators, 'generator')}"


@dataclass(frozen=True, slots=True)
class RankPool:
    """The ranks of a job whose split can change."""

    learners: int  # of the smallest split: these always learn
    generators: int  # of that split: the most that there can be
    width: int = 1  # ranks of a generator (topology.tensor_parallel)
    divisor: int = 1  # of each number of learners: topology.replicas and actor.context_parallel

    def refusal(self, learners: int) -> str:
        """Why there is no split with this number of learner ranks; "" if there is one."""
        most = self.learners + (self.generators - 1) * self.width
        if not self.learners <= learners <= most:
            return f"{self.learners} to {most} ranks may learn, so that one generator is left: {learners} do not"
        if (learners - self.learners) % self.width:
            rule = f"a generator of topology.tensor_parallel = {self.width} ranks becomes {self.width} learner ranks"
            return f"{rule}: {learners} learners differ from {self.learners} by no multiple of it"
        if learners % self.divisor:
            rule = "topology.replicas and actor.context_parallel divide the number of learners"
            return f"{rule}: {learners} is no multiple of {self.divisor}"
        return ""

    def choices(self) -> list[int]:
        """All numbers of learner ranks that can be had, in ascending order."""
        most = self.learners + (self.generators - 1) * self.width
        return [n for n in range(self.learners, most + 1, self.width) if not self.refusal(n)]

    def generators_at(self, learners: int) -> int:
        """Generators beside this number of learner ranks."""
        return self.generators - (learners - self.learners) // self.width

    def has_place(self, role: Role, index: int, split: Split) -> bool:
        """Whether this actor belongs to the split. Guests, whose indices follow those of the job, always do."""
        if role is Role.LEARNER:
            return index < split.learners
        return role is not Role.GENERATOR or index < split.generators or index >= self.generators


def scheduled(schedule: Sequence[tuple[int, int]], version: int) -> int | None:
    """Learner ranks that the schedule, pairs (step, learners) by step, wants at this version; None before its begin."""
    begun = [learners for step, learners in schedule if step <= version]
    return begun[-1] if begun else None


def count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def first_few(texts: Sequence[str]) -> str:
    """The first few texts, and the number of the others."""
    more = len(texts) - N_NAMED
    return ", ".join(texts[:N_NAMED]) + (f" and {more} more" if more > 0 else "")
