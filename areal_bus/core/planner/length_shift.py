"""Detects that the lengths of samples have changed: a z test of their logarithms against those before. Pure: no I/O.

Samples of a group answer the same prompt, so their lengths are alike, and a mean over them is less certain than over as
many independent samples. Its variance is multiplied by the design effect of cluster sampling (Kish 1965), which is
measured here, too: 1 + (k - 1) rho for groups of k with correlation rho.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z = 3.0  # standard errors of the difference: of steady lengths one test in 370 is wrong
FEWEST = 8  # samples that are compared with those before
FEWEST_BEFORE = 16.0  # weight of those before
ALIKE_KEEPS = 0.97  # of what is known of a group's likeness, each time that lengths lose weight
LEAST_VARIANCE = 1e-4  # of the logarithms: equal lengths have none


@dataclass(slots=True)
class LengthShift:
    """The logarithms of lengths (tokens, each above 0), whose old values lose weight."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    # of complete groups: of the differences from the mean of the groups that were added together
    group_squares: float = 0.0  # squares of their sums over a group
    sample_squares: float = 0.0

    @property
    def design_effect(self) -> float:
        """Variance of a mean over that of as many independent samples; at least 1."""
        return max(1.0, self.group_squares / self.sample_squares) if self.sample_squares else 1.0

    def is_seen(self, lengths: Sequence[int]) -> bool:
        """Whether the mean of these lengths differs from that of those before."""
        n = len(lengths)
        if n < FEWEST or self.weight < FEWEST_BEFORE:
            return False
        mean = self.total / self.weight
        variance = max(LEAST_VARIANCE, self.squares / self.weight - mean**2) * self.design_effect
        difference = math.fsum(map(math.log, lengths)) / n - mean
        return abs(difference) > Z * math.sqrt(variance / n + variance / self.weight)

    def add(self, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Lengths, and those of complete groups: samples that happened to end together are alike for another reason."""
        for log in map(math.log, lengths):
            self.weight += 1.0
            self.total += log
            self.squares += log**2
        logs_by_group = [[math.log(length) for length in group] for group in groups]
        logs = [log for group in logs_by_group for log in group]
        if logs:
            mean = math.fsum(logs) / len(logs)
            self.group_squares += math.fsum(math.fsum(log - mean for log in group) ** 2 for group in logs_by_group)
            self.sample_squares += math.fsum((log - mean) ** 2 for log in logs)

    def fade(self, keeps: float) -> None:
        """Old values keep this part of their weight. How alike the samples of a group are is forgotten slowly."""
        self.weight *= keeps
        self.total *= keeps
        self.squares *= keeps
        self.group_squares *= ALIKE_KEEPS
        self.sample_squares *= ALIKE_KEEPS
