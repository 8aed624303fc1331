"""Actors that compute on the same cores: the speed of each while others compute, too. Pure: no I/O.

The scheduler of the operating system shares the cores equally among the processes that want one. A process that needs
less than its share gets all it needs, and the others divide the rest (max-min fairness).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speed of each actor, relative to its speed alone."""

    generator: float = 1.0
    learner: float = 1.0
    background: float = 1.0


@dataclass(frozen=True, slots=True)
class Cores:
    """The cores of a host and the number of cores that each busy actor uses when nothing else runs.

    About 1.0 for an actor that computes on the CPU in one thread, near 0 for one that waits for a GPU or a server.
    """

    n: float
    generator: float = 1.0
    learner: float = 1.0  # of each learner rank
    learners: int = 1
    sample_s: float = 0.0  # CPU seconds of the head and the rewards for each sample
    generator_slowdown: float = 0.0  # share of its speed that it loses while all other cores are busy, if it computes
    learner_slowdown: float = 0.0

    def speeds(self, *, generators: int, trains: bool, background: bool) -> Speeds:
        """Speeds while so many generators are busy, the learner ranks train, and head and rewards have work."""
        learners = self.learners if trains else 0
        wanted = [self.generator] * generators + [self.learner] * learners + [1.0] * background
        share = self.share(wanted)
        crowded = min(1.0, max(0, generators + learners - 1) / max(1.0, self.n - 1))
        return Speeds(
            of_share(share, self.generator) * (1 - self.generator_slowdown * crowded * min(1.0, self.generator)),
            of_share(share, self.learner) * (1 - self.learner_slowdown * crowded * min(1.0, self.learner)),
            of_share(share, 1.0),
        )

    def oversubscribed(self, *, generators: int) -> float:
        """The cores that all actors want at once, over those that there are."""
        return (generators * self.generator + self.learners * self.learner) / self.n if self.n else math.inf

    def share(self, wanted: Sequence[float]) -> float:
        """The most cores that each of these processes gets; inf if there is enough."""
        return equal_share(wanted, self.n)


def of_share(share: float, wanted: float) -> float:
    """Speed of an actor that wants so many cores and gets at most this share."""
    return min(1.0, share / wanted) if wanted > 0 else 1.0


def equal_share(wanted: Sequence[float], n: float) -> float:
    """The most cores that each of these processes gets, where each wants so many of `n`; inf if there is enough."""
    left, n_left = n, len(wanted)
    for one in sorted(wanted):
        if one * n_left > left:
            return left / n_left
        left, n_left = left - one, n_left - 1
    return math.inf


class Work:
    """Work that one actor is doing: seconds left at full speed. `since` is the time of the last change."""

    def __init__(self) -> None:
        self.left_s = self.since = 0.0

    def add(self, seconds: float, now: float, speed: float) -> None:
        self.advance(now, speed)
        self.left_s += seconds

    def advance(self, now: float, speed: float) -> None:
        """Pass the time until now at this speed."""
        self.left_s = max(0.0, self.left_s - (now - self.since) * speed)
        self.since = now

    def end(self, speed: float) -> float:
        """Time at which it is done at this speed."""
        return self.since + self.left_s / speed
