"""Runs that differ in their seed only: means with standard errors over seeds, and differences paired by seed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import fsum, sqrt
from statistics import fmean, stdev

from tools.report.facts.curves import Curve, CurveBin
from tools.report.facts.run_facts import RunFacts
from tools.report.facts.settings_rows import SEED, identity

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


N_PLACES = 160  # points of an overlaid curve


@dataclass(slots=True)
class SeedGroup:
    """One or more runs of the same settings."""

    name: str
    runs: list[RunFacts] = field(default_factory=list)

    def curves(self, series: str) -> list[Curve]:
        """The curves of its runs that have a point."""
        return [curve for run in self.runs if len(curve := run.curve(series))]


def groups_of(runs: Sequence[RunFacts]) -> list[SeedGroup]:
    """Groups in the order of their first runs, named by them. A run without a config is a group of its own."""
    found: dict[str, SeedGroup] = {}
    for place, one in enumerate(runs):
        key = identity(one.config) if one.config else f"no config: {place}"
        found.setdefault(key, SeedGroup(one.name)).runs.append(one)
    for group in found.values():
        if len(group.runs) > 1:
            seeds = ", ".join(str(one.setting(SEED)) for one in group.runs)
            group.name = f"{group.name} (seeds {seeds})"
    return list(found.values())


def mean_and_range(curves: Sequence[Curve]) -> list[CurveBin]:
    """The mean over curves by version, with the least and the largest curve as a band. A version needs one curve."""
    versions = [version for curve in curves for version in (curve.versions[0], curve.versions[-1])]
    low, high = min(versions), max(versions)
    width = max(1, -(-(high - low + 1) // N_PLACES))
    places: dict[int, list[float]] = {}
    for curve in curves:
        of_curve: dict[int, list[float]] = {}
        for version, value in zip(curve.versions, curve.values, strict=True):
            of_curve.setdefault((version - low) // width, []).append(value)
        for place, values in of_curve.items():
            places.setdefault(place, []).append(fsum(values) / len(values))
    return [
        CurveBin(min(low + (place + 1) * width - 1, high), fsum(values) / len(values), min(values), max(values))
        for place, values in sorted(places.items())
    ]
