"""Runs that differ in their seed only, as one group: its curves are the mean over the seeds, the range is a band."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import fsum

from tools.report.facts.curves import Curve, CurveBin
from tools.report.facts.run_facts import RunFacts
from tools.report.facts.settings_rows import SEED, identity

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
