"""Several sources in one run: each draw takes the source that is furthest behind its weight. Pure.

After any number of draws each source has its share, to within about one row, so batches are mixed evenly. When a
source has ended, the others share the following draws. The run's data ends with the last of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from areal_bus.core.rows.data_source import DataSource, Row


def turn(n_drawn: int, weight: float) -> float:
    """The source with the smallest number is next (Webster's method); of equal ones the first."""
    return (n_drawn + 0.5) / weight


@dataclass(frozen=True, slots=True)
class WeightedSource:
    """A source with its name and its weight, above 0."""

    name: str
    weight: float
    source: DataSource


class Mixture:
    """A data source of several; its rows carry the name of theirs."""

    def __init__(self, parts: Sequence[WeightedSource]) -> None:
        self._parts = {part.name: part for part in parts}

    @property
    def position(self) -> int:
        """Rows drawn from all sources."""
        return sum(part.source.position for part in self._parts.values())

    def draw(self) -> Row | None:
        """The next row; None when all sources have ended."""
        for part in sorted(self._parts.values(), key=lambda part: turn(part.source.position, part.weight)):
            row = part.source.draw()
            if row is not None:
                return replace(row, source=part.name)
        return None

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        self._parts[row.source].source.learn(row, n_right, n_judged)

    def state(self) -> str:
        """JSON: position and state of each source by name."""
        return json.dumps({name: [p.source.position, p.source.state()] for name, p in self._parts.items()})

    def go_to(self, position: int, state: str) -> None:
        """Continue after `position` draws. Raises ValueError where a position other than 0 has no state."""
        if position and not state:
            raise ValueError(f"several sources continue from their state: position {position} has none")
        found = json.loads(state) if state else {}
        for name, part in self._parts.items():
            part.source.go_to(*found.get(name, (0, "")))
