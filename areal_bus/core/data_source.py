"""The data cursor: supplies the next row and keeps the rows of open prompts.

Rows that are issued again come first, then rows of the source.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Row:
    """One row of the data, drawn in order."""

    row: int
    epoch: int
    text: str  # JSON object


class DataSource(Protocol):
    """The prompts of the run in their order."""

    position: int  # rows drawn so far; set to go back or on

    def draw(self) -> Row | None:
        """The next row; None when the data has ended."""


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
        self.restart(position=source.position, again=())

    def restart(self, *, position: int, again: Iterable[IssuedRow]) -> None:
        """Nothing is open; the next new row is that at `position`, after those to issue again."""
        self._source.position = position
        self._ended = False
        self._again: deque[IssuedRow] = deque(again)
        self._open: dict[int, IssuedRow] = {}  # uid -> its row

    @property
    def position(self) -> int:
        """Rows drawn from the source."""
        return self._source.position

    @property
    def waiting(self) -> tuple[IssuedRow, ...]:
        """Rows to be issued again."""
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
        """The row is prompt `uid` now."""
        self._open[uid] = issue

    def of(self, uid: int) -> IssuedRow:
        return self._open[uid]

    def close(self, uid: int) -> IssuedRow:
        """The prompt is trained or refunded."""
        return self._open.pop(uid)

    def again(self, issue: IssuedRow) -> bool:
        """The row is to be issued once more. Returns False when it was issued often enough."""
        if issue.n_before >= self._max_reissues:
            return False
        self._again.append(IssuedRow(issue.drawn, issue.n_before + 1))
        return True
