"""The order of rows: each pass visits every row once, in a new seeded order, or by a curriculum. Pure.

The curriculum goes by pass rate: rows that the policy always or never solves are visited in fewer passes. The pass rate
of a row is that of its last group that was trained, or refunded for having no signal. A row whose rate is outside of
the window is visited `every` passes after that group's pass. All other rows are visited in each pass. The rows of a
pass are fixed when it begins, so that the state is small and a resumed run draws the same rows.
"""

import json
import random
from dataclasses import dataclass


def permuted(n_rows: int, *, seed: int | str, pass_: int, shuffle: bool) -> list[int]:
    """The rows of one pass in their order."""
    rows = list(range(n_rows))
    if shuffle:
        random.Random(f"{seed}:{pass_}").shuffle(rows)
    return rows


class RowOrder:
    """`row(k)` is the k-th draw. A resumed run continues at k: there is no state but the position."""

    def __init__(self, n_rows: int, *, seed: int | str, shuffle: bool = True, passes: int | None = None) -> None:
        """`passes`: data.total_train_epochs; None: unlimited. Raises ValueError without rows."""
        if n_rows < 1:
            raise ValueError(f"an order needs at least one row: it got {n_rows}")
        self.n_rows = n_rows
        self.total = None if passes is None else passes * n_rows
        self.position = 0  # of the next draw
        self._seed = seed
        self._shuffle = shuffle
        self._pass: int | None = None  # pass of the cached permutation
        self._permutation: list[int] = []

    def row(self, k: int) -> tuple[int, int]:
        """(pass, row) of the k-th draw, both from 0. Raises IndexError after the last pass."""
        if k < 0 or (self.total is not None and k >= self.total):
            raise IndexError(f"draws are numbered from 0 to below {self.total}: asked for {k}")
        pass_, position = divmod(k, self.n_rows)
        if not self._shuffle:
            return pass_, position
        if pass_ != self._pass:
            self._permutation = permuted(self.n_rows, seed=self._seed, pass_=pass_, shuffle=True)
            self._pass = pass_
        return pass_, self._permutation[position]

    def draw(self) -> tuple[int, int] | None:
        """(pass, row) of the next draw; None after the last pass."""
        if self.total is not None and self.position >= self.total:
            return None
        drawn = self.row(self.position)
        self.position += 1
        return drawn

    def learn(self, drawn: tuple[int, int], n_right: int, n_judged: int) -> None:
        """Nothing: this order depends on no result."""

    def state(self) -> str:
        return ""

    def go_to(self, position: int, state: str) -> None:
        self.position = position


@dataclass(frozen=True, slots=True)
class PassRateWindow:
    """Pass rates that are worth training: low < rate < high. Other rows come in one of `every` passes."""

    low: float
    high: float
    every: int

    def contains(self, n_right: int, n_judged: int) -> bool:
        return self.low < n_right / n_judged < self.high


class Curriculum:
    """An order of rows as `RowOrder`, without the rows that rest."""

    def __init__(
        self,
        n_rows: int,
        window: PassRateWindow,
        *,
        seed: int | str,
        shuffle: bool = True,
        passes: int | None = None,
    ) -> None:
        """`passes`: data.total_train_epochs; None: unlimited. Raises ValueError without rows."""
        if n_rows < 1:
            raise ValueError(f"an order needs at least one row: it got {n_rows}")
        self.n_rows = n_rows
        self.total = None if passes is None else passes * n_rows  # at most
        self._window, self._seed, self._shuffle, self._passes = window, seed, shuffle, passes
        self.go_to(0, "")

    def draw(self) -> tuple[int, int] | None:
        """(pass, row) of the next draw; None after the last pass."""
        while self._at == len(self._rows):
            if self._passes is not None and self._pass + 1 >= self._passes:
                return None
            self._begin(self._pass + 1, {row for row, due in self._due.items() if due > self._pass + 1})
        self._at += 1
        self.position += 1
        return self._pass, self._rows[self._at - 1]

    def learn(self, drawn: tuple[int, int], n_right: int, n_judged: int) -> None:
        """Record the right samples of this draw's group. Without a judged sample nothing changes."""
        pass_, row = drawn
        if not n_judged:
            return
        if self._window.contains(n_right, n_judged):
            self._due.pop(row, None)
        else:
            self._due[row] = pass_ + self._window.every

    def state(self) -> str:
        """JSON: the pass, the draws in it, the rows that it leaves out, and the pass of each row that rests."""
        found = {"pass": self._pass, "at": self._at, "left_out": sorted(self._left_out)}
        return json.dumps(found | {"due": sorted(self._due.items())})

    def go_to(self, position: int, state: str) -> None:
        """Continue after `position` draws. Raises ValueError where a position other than 0 has no state."""
        if position and not state:
            raise ValueError(f"missing state of the curriculum at position {position}: it continues from it")
        self.position = position
        self._due: dict[int, int] = {}  # rows outside of the window -> the next pass that visits them
        self._left_out: set[int] = set()
        self._pass, self._at = -1, 0  # the pass, and the draws in it
        self._rows: list[int] = []
        if state:
            found = json.loads(state)
            self._begin(found["pass"], set(found["left_out"]))
            self._at, self._due = found["at"], dict(found["due"])

    def _begin(self, pass_: int, left_out: set[int]) -> None:
        self._pass, self._at, self._left_out = pass_, 0, left_out
        if pass_ >= 0:
            rows = permuted(self.n_rows, seed=self._seed, pass_=pass_, shuffle=self._shuffle)
            self._rows = [row for row in rows if row not in left_out]
