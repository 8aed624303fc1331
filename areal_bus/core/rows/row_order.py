"""The order of rows: each pass visits every row once, in a new seeded order. Pure: a function of the draw's number."""

import random


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
