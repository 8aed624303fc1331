"""Sums by version in a bounded number of equal bins, which widen as the run grows; and the versions of a time span."""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field

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
