"""The data source: draws rows in a new random order for each pass."""

import json
import random
from typing import Any

from areal_bus.core.data_source import Row


class RowOrder:
    """The order of rows: `row(k)` is the k-th draw; each pass visits every row once. A resumed run continues at k."""

    def __init__(self, n_rows: int, *, seed: int, shuffle: bool = True, passes: int | None = None) -> None:
        """`passes`: data.total_train_epochs; None: unlimited."""
        if n_rows < 1:
            raise ValueError(f"an order needs at least one row: it got {n_rows}")
        self.n_rows = n_rows
        self.total = None if passes is None else passes * n_rows
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
            self._permutation = list(range(self.n_rows))
            random.Random(f"{self._seed}:{pass_}").shuffle(self._permutation)
            self._pass = pass_
        return pass_, self._permutation[position]


class RowSource:
    """Draws rows in order; `position` is the number of the next draw."""

    def __init__(self, rows: list[dict[str, Any]], order: RowOrder) -> None:
        self.rows = rows
        self.order = order
        self.position = 0

    def draw(self) -> Row | None:
        """The next row; None after the last pass."""
        if self.order.total is not None and self.position >= self.order.total:
            return None
        epoch, row = self.order.row(self.position)
        self.position += 1
        return Row(row, epoch, json.dumps(self.rows[row], ensure_ascii=False))
