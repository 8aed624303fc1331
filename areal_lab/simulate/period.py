"""The part of a run in which one split of ranks held (docs/adapt.md): only that part describes a ring of this split."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from areal_lab.simulate.generator_history import sample_key
from tools.run import Line


@dataclass(frozen=True, slots=True)
class Period:
    """Monotonic time from the beginning of a split to that of the next one. Without bounds: the whole run."""

    began: float = -math.inf
    ended: float = math.inf

    @property
    def is_whole(self) -> bool:
        return math.isinf(self.began) and math.isinf(self.ended)

    def of(self, lines: Iterable[Line]) -> list[Line]:
        """The lines of this time."""
        return [line for line in lines if self.began <= line["t"] < self.ended]

    def of_generator(self, lines: Sequence[Line]) -> list[Line]:
        """The lines of this time, after the requests of samples that were in flight when it began."""
        in_flight: dict[object, Line] = {}
        for line in lines:
            if line["t"] >= self.began:
                break
            if line["event"] == "request":
                in_flight[sample_key(line)] = line
            elif line["event"] == "completion":
                in_flight.pop(sample_key(line), None)
        return [*in_flight.values(), *self.of(lines)]


def longest_period(head: Sequence[Line]) -> Period:
    """The split in which most updates were made, the newest of equals."""
    changes = [line["t"] for line in head if line["event"] == "split" and line["why"] == "change"]
    periods = [Period(*bounds) for bounds in pairwise([-math.inf, *changes, math.inf])]
    n_updates = [sum(line["event"] == "update" for line in period.of(head)) for period in periods]
    return max(zip(n_updates, range(len(periods)), periods, strict=True))[-1]


def wrote_between(lines: Iterable[Line], began: float, ended: float) -> bool:
    """Whether an actor with these lines wrote one between these times."""
    return any(began <= line["t"] <= ended for line in lines)
