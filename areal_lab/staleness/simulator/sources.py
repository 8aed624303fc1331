"""Several sources with a curriculum in a simulated ring, and an independent account of which row is next."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from areal_bus.core.rows import Curriculum, DataSource, Mixture, PassRateWindow, Row, RowOrder, WeightedSource

Key = tuple[str, int, int]  # source, pass, row
Learned = tuple[Key, int, int]  # a finished group: its row, right samples, judged samples


@dataclass(frozen=True, slots=True)
class SimulatedSource:
    """Rows 0 .. n_rows - 1, pass after pass."""

    name: str
    weight: float
    n_rows: int


class NumberedRows:
    """A data source whose rows have only a number."""

    def __init__(self, order: RowOrder | Curriculum) -> None:
        self._order = order

    @property
    def position(self) -> int:
        return self._order.position

    def draw(self) -> Row | None:
        drawn = self._order.draw()
        return None if drawn is None else Row(drawn[1], drawn[0], str(drawn[1]))

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        self._order.learn((row.epoch, row.row), n_right, n_judged)

    def state(self) -> str:
        return self._order.state()

    def go_to(self, position: int, state: str) -> None:
        self._order.go_to(position, state)


def mixture(sources: Sequence[SimulatedSource], window: PassRateWindow | None, *, seed: int) -> DataSource:
    """The mixture from which a ring draws."""
    parts = []
    for one in sources:
        own = f"{seed}:{one.name}"
        order = RowOrder(one.n_rows, seed=own) if window is None else Curriculum(one.n_rows, window, seed=own)
        parts.append(WeightedSource(one.name, one.weight, NumberedRows(order)))
    return Mixture(parts)


class ExpectedRows:
    """Computes the next new row from the drawn rows and the finished groups, independently of the data source."""

    def __init__(self, sources: Sequence[SimulatedSource], window: PassRateWindow | None, *, seed: int) -> None:
        self._sources, self._window, self._seed = sources, window, seed
        self._order: dict[tuple[str, int], list[int]] = {}  # (source, pass) -> its rows, fixed when it began

    def next(self, drawn: Mapping[Key, str], learned: Sequence[Learned]) -> Key:
        counts = {one.name: sum(key[0] == one.name for key in drawn) for one in self._sources}
        source = min(self._sources, key=lambda one: (counts[one.name] + 0.5) / one.weight)
        keys = [key for key in drawn if key[0] == source.name]
        pass_ = max((key[1] for key in keys), default=0)
        n_drawn = sum(key[1] == pass_ for key in keys)
        if not n_drawn:
            self._order[source.name, pass_] = self._rows(source, pass_, learned)
        while n_drawn >= len(self._order[source.name, pass_]):
            pass_, n_drawn = pass_ + 1, 0
            self._order[source.name, pass_] = self._rows(source, pass_, learned)
        return source.name, pass_, self._order[source.name, pass_][n_drawn]

    def _rows(self, source: SimulatedSource, pass_: int, learned: Sequence[Learned]) -> list[int]:
        rows = list(range(source.n_rows))
        random.Random(f"{self._seed}:{source.name}:{pass_}").shuffle(rows)
        last = {row: (epoch, n_right, n) for (name, epoch, row), n_right, n in learned if n and name == source.name}
        return [row for row in rows if row not in last or not self._rests(*last[row], pass_)]

    def _rests(self, epoch: int, n_right: int, n_judged: int, pass_: int) -> bool:
        window = self._window
        if window is None or window.low < n_right / n_judged < window.high:
            return False
        return pass_ < epoch + window.every
