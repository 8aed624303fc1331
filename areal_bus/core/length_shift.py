"""Detects that the lengths of samples have changed: a z test of their logarithms against those before. Pure: no I/O."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 3.0  # standard errors of the difference: of steady, independent lengths one test in 370 is wrong
FEWEST = 8  # samples that are compared with those before
FEWEST_BEFORE = 16.0  # weight of those before
LEAST_VARIANCE = 1e-4  # of the logarithms: equal lengths have none


@dataclass(slots=True)
class LengthShift:
    """The logarithms of lengths, whose old values lose weight."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0

    def is_seen(self, lengths: Sequence[int]) -> bool:
        """Whether the mean of these lengths (tokens, each above 0) differs from that of those before."""
        n = len(lengths)
        if n < FEWEST or self.weight < FEWEST_BEFORE:
            return False
        mean = self.total / self.weight
        variance = max(LEAST_VARIANCE, self.squares / self.weight - mean**2)
        difference = math.fsum(map(math.log, lengths)) / n - mean
        return abs(difference) > Z * math.sqrt(variance / n + variance / self.weight)

    def add(self, lengths: Sequence[int]) -> None:
        for length in lengths:
            log = math.log(length)
            self.weight += 1.0
            self.total += log
            self.squares += log**2

    def fade(self, keeps: float) -> None:
        """Old values keep this part of their weight."""
        self.weight *= keeps
        self.total *= keeps
        self.squares *= keeps
