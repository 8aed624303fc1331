"""Laws of a workload: lengths of completions and speeds of actors.

`survives(n)` is the probability that an answer is longer than n tokens. Everything else follows from it, so the hazard
by which a sampler ends a text, and the lengths that a planner draws, are of one law.

A decode step reads all the weights once, whoever is live, and then costs a bit for each sample: its time is affine in
their number, and the tokens a second rise to a limit. Longer contexts cost no more here, and prefills stop decoding.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class LengthLaw:
    """ln(length) is normal around ln(median) with deviation sigma; sigma 0: all answers have the median, rounded."""

    median: float  # tokens, 1 or more
    sigma: float

    def survives(self, n: int) -> float:
        """P(an answer has more than n tokens)."""
        if n < 1:
            return 1.0
        if not self.sigma:
            return 1.0 if n < max(1, round(self.median)) else 0.0
        return 0.5 * math.erfc(math.log(n / self.median) / (self.sigma * math.sqrt(2)))

    def hazard(self, n: int) -> float:
        """P(token n, from 1, is the last | there is one)."""
        alive = self.survives(n - 1)
        return (alive - self.survives(n)) / alive if alive else 1.0

    def draw(self, uniform: float, *, beyond: int = 0) -> int:
        """The length at this quantile, uniform in [0, 1), of the answers that are longer than `beyond` tokens.

        A length that it gives has a hazard above 0.
        """
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
        """Of answers that are cut at `most` tokens."""
        return math.fsum(self.survives(n) for n in range(most))

    def _near(self, target: float) -> int:
        """About the length that this share survives."""
        if not 0.0 < target < 1.0:
            return 1
        return max(1, math.ceil(self.median * math.exp(-self.sigma * NORMAL.inv_cdf(target))))


@dataclass(frozen=True, slots=True)
class SpeedLaw:
    """Of one generator."""

    decode_tokens_per_s: float  # of all live samples together, at the limit of many
    half_slots: float  # live samples that reach half of it; 0: one reaches all of it
    prefill_tokens_per_s: float
    update_s: float  # it stands still so long when it swaps in weights

    def step_s(self, n_live: int) -> float:
        """One token for each live sample."""
        return (n_live + self.half_slots) / self.decode_tokens_per_s

    def prefill_s(self, n_tokens: int) -> float:
        return n_tokens / self.prefill_tokens_per_s

    def tokens_per_s(self, n_live: int) -> float:
        """Of all live samples together."""
        return n_live / self.step_s(n_live) if n_live else 0.0
