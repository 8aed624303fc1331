"""A scalar over versions: grows point by point, forgets undone versions, and is drawn as at most a few hundred bins."""

import math
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise

MAX_BINS = 240


@dataclass(frozen=True, slots=True)
class CurveBin:
    """The values of neighbouring versions."""

    x: float  # the last version
    mean: float
    low: float
    high: float


@dataclass(slots=True)
class Curve:
    """Values by version, in order. A value that is not finite is counted and not kept."""

    versions: "array[int]" = field(default_factory=lambda: array("q"))
    values: "array[float]" = field(default_factory=lambda: array("d"))
    n_not_finite: int = 0

    def __len__(self) -> int:
        return len(self.values)

    def add(self, version: int, value: float) -> None:
        """Add a point. One of an earlier version than the last is ignored."""
        if not math.isfinite(value):
            self.n_not_finite += 1
        elif not self.versions or version >= self.versions[-1]:
            self.versions.append(version)
            self.values.append(value)

    def cut(self, version: int) -> None:
        """Remove the points of later versions."""
        place = bisect_right(self.versions, version)
        del self.versions[place:], self.values[place:]

    def bins(self, most: int = MAX_BINS) -> list[CurveBin]:
        """At most `most` bins of about equally many points; each point is a bin where there are no more."""
        n = min(len(self), most)
        edges = [round(i * len(self) / n) for i in range(n + 1)] if n else []
        parts = [(self.versions[end - 1], self.values[begin:end]) for begin, end in pairwise(edges)]
        return [CurveBin(x, math.fsum(part) / len(part), min(part), max(part)) for x, part in parts]

    def at(self, version: int) -> float | None:
        """The last value of this version."""
        place = bisect_right(self.versions, version) - 1
        return self.values[place] if place >= 0 and self.versions[place] == version else None


MOST = 120  # bins


@dataclass(slots=True)
class StepBins:
    """Name -> bin -> sum. Bin b holds the versions from b * width to (b + 1) * width - 1."""

    width: int = 1
    sums: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, name: str, version: int, value: float) -> None:
        while version // self.width >= MOST:
            self._widen()
        bins = self.sums.setdefault(name, {})
        bins[version // self.width] = bins.get(version // self.width, 0.0) + value

    def _widen(self) -> None:
        self.width *= 2
        for name, bins in self.sums.items():
            wide: dict[int, float] = {}
            for place, value in bins.items():
                wide[place // 2] = wide.get(place // 2, 0.0) + value
            self.sums[name] = wide

    def total(self, name: str) -> float:
        return sum(self.sums.get(name, {}).values())


@dataclass(slots=True)
class VersionClock:
    """Which version was in the making when: version 1 until the first update."""

    walls: list[float] = field(default_factory=list)  # when a version was made, seconds since 1970
    versions: list[int] = field(default_factory=lambda: [1])  # one more: the version in the making from then on

    def update(self, wall: float, version: int) -> None:
        """A version was made, or training goes back to it."""
        if self.walls and wall < self.walls[-1]:
            wall = self.walls[-1]
        self.walls.append(wall)
        self.versions.append(version + 1)

    def split(self, begin: float, end: float) -> Iterator[tuple[int, float]]:
        """(version, seconds) of each version in the making from `begin` to `end`."""
        at = begin
        for place in range(bisect_right(self.walls, begin), bisect_left(self.walls, end)):
            yield self.versions[place], self.walls[place] - at
            at = self.walls[place]
        yield self.versions[bisect_left(self.walls, end)], max(end - at, 0.0)
