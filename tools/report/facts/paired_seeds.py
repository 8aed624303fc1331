"""Means with standard errors over seeds, and differences paired by seed. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import fmean, stdev

# 97.5 % quantiles of Student's t distribution by degrees of freedom
T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
Z_975 = 1.960


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over seeds with its standard error (None for one seed)."""

    value: float
    se: float | None
    n: int


@dataclass(frozen=True, slots=True)
class Difference:
    """Mean of a cell minus the baseline over the seeds that both have, with its 95 % interval (Student's t)."""

    mean: float
    low: float | None
    high: float | None
    n: int

    @property
    def verdict(self) -> str:
        """The conclusion from the interval."""
        if self.low is None or self.high is None:
            return "one seed only"
        if self.low > 0:
            return "higher"
        return "lower" if self.high < 0 else "no difference seen"


def mean_over(values: Sequence[float]) -> Mean | None:
    if not values:
        return None
    se = stdev(values) / sqrt(len(values)) if len(values) > 1 else None
    return Mean(fmean(values), se, len(values))


def paired(scores: Mapping[int, float], baseline: Mapping[int, float]) -> Difference | None:
    """The difference over the seeds of both; None without a common seed."""
    differences = [scores[seed] - baseline[seed] for seed in sorted(scores.keys() & baseline.keys())]
    found = mean_over(differences)
    if found is None:
        return None
    if found.se is None:
        return Difference(found.value, None, None, 1)
    half = t_975(found.n - 1) * found.se
    return Difference(found.value, found.value - half, found.value + half, found.n)


def t_975(degrees: int) -> float:
    return T_975[degrees - 1] if degrees <= len(T_975) else Z_975
