"""Workload model: distribution of completion lengths, and speeds of a generator. Pure: no I/O.

`survives(n)` is the probability that a completion is longer than n tokens. Hazard and drawn lengths both follow from
it, so the simulated engine and the planner use the same distribution.

A decode step reads all weights once and has a small cost for each live sample. Its time is affine in their number, and
throughput approaches a limit. Context length has no cost in this model, and prefills pause decoding.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """Log-normal lengths with this median; sigma = 0: every completion has the rounded median."""

    median: float  # tokens, 1 or more
    sigma: float

    def survives(self, n: int) -> float:
        if n < 1:
            return 1.0
        if not self.sigma:
            return 1.0 if n < max(1, round(self.median)) else 0.0
        return 0.5 * math.erfc(math.log(n / self.median) / (self.sigma * math.sqrt(2)))

    def hazard(self, n: int) -> float:
        """P(length = n | length >= n), for n from 1."""
        alive = self.survives(n - 1)
        return (alive - self.survives(n)) / alive if alive else 1.0

    def draw(self, uniform: float, *, beyond: int = 0) -> int:
        """Length at this quantile in [0, 1), given that it is above `beyond` tokens. Its hazard is above 0."""
        alive = self.survives(beyond)
        if not alive:
            return beyond + 1
        target = (1.0 - uniform) * alive
        n = max(beyond + 1, self._near(target))
        while n > beyond + 1 and self.survives(n - 1) < target:
            n -= 1
        while self.survives(n) >= target:
            n += 1
        return n

    def mean(self, most: int) -> float:
        """Mean length of completions truncated at `most` tokens."""
        return math.fsum(self.survives(n) for n in range(most))

    def _near(self, target: float) -> int:
        """Approximate length n with survives(n) = target."""
        if not 0.0 < target < 1.0:
            return 1
        return max(1, math.ceil(self.median * math.exp(-self.sigma * NORMAL.inv_cdf(target))))


@dataclass(frozen=True, slots=True)
class SpeedLaw:
    """Speeds of one generator."""

    decode_tokens_per_s: float  # limit, over all live samples
    half_slots: float  # live samples that reach half of it; 0: one sample reaches all
    prefill_tokens_per_s: float
    update_s: float  # pause at each weight update

    def step_s(self, n_live: int) -> float:
        """Time of one decode step: one token for each live sample."""
        return (n_live + self.half_slots) / self.decode_tokens_per_s

    def prefill_s(self, n_tokens: int) -> float:
        return n_tokens / self.prefill_tokens_per_s

    def tokens_per_s(self, n_live: int) -> float:
        """Decode throughput over all live samples."""
        return n_live / self.step_s(n_live) if n_live else 0.0
