"""Which row is issued next: row order, curriculum, mixture of sources, and the cursor that saves its position. Pure.

Each pass visits every row once, in a new seeded order, or by a curriculum. The curriculum goes by pass rate: rows that
the policy always or never solves are visited in fewer passes. The pass rate of a row is that of its last group that was
trained, or refunded for having no signal. A row whose rate is outside of the window is visited `every` passes after
that group's pass. All other rows are visited in each pass. The rows of a pass are fixed when it begins, so that the
state is small and a resumed run draws the same rows.

The cursor supplies rows to be issued again first, then rows of the source, and keeps the rows of open prompts.
"""

import json
import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from areal_bus.messages import MAX_TEXT_BYTES


def permuted(n_rows: int, *, seed: int | str, pass_: int, shuffle: bool) -> list[int]:
    rows = list(range(n_rows))
    if shuffle:
        random.Random(f"{seed}:{pass_}").shuffle(rows)
    return rows


def n_draws(n_rows: int, passes: int | None) -> int | None:
    if n_rows < 1:
        raise ValueError(f"an order needs at least one row: it got {n_rows}")
    return None if passes is None else passes * n_rows


class RowOrder:
    """`row(k)` is the k-th draw. A resumed run continues at k: there is no state but the position."""

    def __init__(self, n_rows: int, *, seed: int | str, shuffle: bool = True, passes: int | None = None) -> None:
        """`passes`: data.total_train_epochs; None: unlimited. Raises ValueError without rows."""
        self.n_rows, self.total = n_rows, n_draws(n_rows, passes)
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
        self, n_rows: int, window: PassRateWindow, *, seed: int | str, shuffle: bool = True, passes: int | None = None
    ) -> None:
        """`passes`: data.total_train_epochs; None: unlimited. Raises ValueError without rows."""
        self.n_rows, self.total = n_rows, n_draws(n_rows, passes)  # at most
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


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data, drawn in order."""

    row: int
    epoch: int
    text: str  # JSON object
    source: str = ""  # name of its [[data.source]]; "" where there is only one
    digest: str = ""  # of the text of a loader's row, whose number does not say which row it is; "": the number does


def oversize(text: str) -> str:
    """Why this row cannot be sent with a prompt; "" if it can."""
    if len(text) <= MAX_TEXT_BYTES // 4 or (n_bytes := len(text.encode(errors="replace"))) <= MAX_TEXT_BYTES:
        return ""
    return f"a row of the data has at most {MAX_TEXT_BYTES} bytes as JSON; this one has {n_bytes}"


class DataSource(Protocol):
    """The rows of the run, in order. The next row depends only on its position and state."""

    @property
    def position(self) -> int:
        """Rows drawn so far."""

    def draw(self) -> Row | None:
        """The next row; None when the data has ended."""

    def learn(self, row: Row, n_right: int, n_judged: int) -> None:
        """Record the right samples among the judged ones of this row's group."""

    def state(self) -> str:
        """What `go_to` needs beside the position, as JSON; "" for a source that needs nothing."""

    def go_to(self, position: int, state: str) -> None:
        """Continue from this position and state; position 0 without a state is the begin."""


@dataclass(frozen=True, slots=True)
class IssuedRow:
    """A row that was issued as a prompt."""

    drawn: Row
    n_before: int  # times the row was issued before, in this trip through the data


class DataCursor:
    """Issues rows, keeps each while its prompt is open, and queues rows that are issued again."""

    def __init__(self, source: DataSource, *, max_reissues: int) -> None:
        self._source = source
        self._max_reissues = max_reissues
        self.restart(position=source.position, again=(), state=source.state())

    def restart(self, *, position: int, again: Iterable[IssuedRow], state: str) -> None:
        """Forget open prompts. Rows to issue again come first, then the row at `position`."""
        self._source.go_to(position, state)
        self._ended = False
        self._again: deque[IssuedRow] = deque(again)
        self._open: dict[int, IssuedRow] = {}  # uid -> its row

    @property
    def position(self) -> int:
        """Number of rows drawn from the source."""
        return self._source.position

    @property
    def state(self) -> str:
        """Of the source, beside its position."""
        return self._source.state()

    @property
    def waiting(self) -> tuple[IssuedRow, ...]:
        return tuple(self._again)

    @property
    def is_exhausted(self) -> bool:
        """No rows are left."""
        return self._ended and not self._again

    def draw(self) -> IssuedRow | None:
        """The next row to issue; None when there is none."""
        if self._again:
            return self._again.popleft()
        drawn = None if self._ended else self._source.draw()
        if drawn is None:
            self._ended = True
            return None
        return IssuedRow(drawn, 0)

    def issue(self, uid: int, issue: IssuedRow) -> None:
        """Record that the row was issued as prompt `uid`."""
        self._open[uid] = issue

    def of(self, uid: int) -> IssuedRow:
        return self._open[uid]

    def learn(self, uid: int, n_right: int, n_judged: int) -> None:
        """Record the result of a complete group that is trained, or refunded without signal."""
        self._source.learn(self._open[uid].drawn, n_right, n_judged)

    def close(self, uid: int) -> IssuedRow:
        """The prompt is trained or refunded."""
        return self._open.pop(uid)

    def again(self, issue: IssuedRow) -> bool:
        """Queue the row to be issued again. Returns False if it was issued too often."""
        if issue.n_before >= self._max_reissues:
            return False
        self._again.append(IssuedRow(issue.drawn, issue.n_before + 1))
        return True


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
    """A data source of several: draws from the one furthest behind its weight, until the last has ended."""

    def __init__(self, parts: Sequence[WeightedSource]) -> None:
        self._parts = {part.name: part for part in parts}

    @property
    def position(self) -> int:
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
            raise ValueError(f"missing state of the sources at position {position}: several sources continue from it")
        found = json.loads(state) if state else {}
        for name, part in self._parts.items():
            part.source.go_to(*found.get(name, (0, "")))
