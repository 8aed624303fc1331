"""Rows of the data by pass: each is drawn once, and again only after a refund that allows it (I4); knows no prompt."""

from tools.audit.journal_reader import JournalFile

FAR = 1 << 24  # a number beyond what a damaged journal may make us keep a byte for
MOST_AGAIN = 3
_WAITING = range(2, 2 * MOST_AGAIN + 2, 2)
_MOST = 250  # a byte has room for a few more

Row = tuple[int, int]  # epoch, row


class Passes:
    """A byte a row: 2 k + 1 when it was drawn again for the k-th time, 2 k when it may be."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self._rows: dict[int, bytearray] = {}  # by epoch
        self._n_waiting = 0  # rows to be drawn again

    def draw(self, at: Row, uid: int) -> int:
        """In one pass each row is drawn once. Returns how often this one was drawn before."""
        epoch, row = at
        if not 0 <= row < FAR or not 0 <= epoch < FAR:
            self.file.add("I4", f"a row is an index of the data, in a pass: row {row} of pass {epoch}", uid=uid)
            return 0
        rows = self._rows.setdefault(epoch, bytearray())
        if row >= len(rows):
            rows.extend(bytes(row + 1 - len(rows)))
        before = rows[row]
        if before % 2:
            self.file.add("I4", f"in each pass every row is drawn once: row {row} again in pass {epoch}", uid=uid)
        elif before:
            self._n_waiting -= 1
        elif self._n_waiting:
            text = f"rows to be drawn again come before new ones: {self._n_waiting} wait when row {row} is drawn"
            self.file.add("I4", text, uid=uid)
        rows[row] = min(before + 1 + before % 2, _MOST + 1)
        if rows[row] > 2 * MOST_AGAIN + 1:
            self.file.add("I4", f"a row is issued again at most {MOST_AGAIN} times: row {row} of pass {epoch}", uid=uid)
        return rows[row] // 2

    def release(self, at: Row) -> None:
        """A row that became too old may be drawn again."""
        epoch, row = at
        rows = self._rows.get(epoch, bytearray())
        if row < len(rows) and rows[row] % 2:
            rows[row] = min(rows[row] + 1, _MOST)
            self._n_waiting += 1

    # terms

    def put_back(self, at: Row, *, n_before: int, is_drawn: bool) -> None:
        """As it was when it had been drawn so many times before the draw that is undone, or done once more."""
        epoch, row = at
        rows = self._rows.get(epoch, bytearray())
        if row < len(rows):
            rows[row] = 2 * n_before + is_drawn

    def go_on_at(self, position: int) -> None:
        """After all were put back: the next new row is the one after those that are drawn."""
        self._n_waiting = sum(rows.count(value) for rows in self._rows.values() for value in _WAITING)
        drawn = sum(map(_n_drawn, self._rows.values()))
        if position != drawn:
            text = f"a term draws on after the rows of its prompts: {drawn} are drawn, position is {position}"
            self.file.add("I4", text)

    # the end

    @property
    def n_reissued(self) -> int:
        """How often a row was given free to be drawn again."""
        values = range(2, _MOST + 2)
        return sum(rows.count(value) * (value // 2) for rows in self._rows.values() for value in values)

    def close(self) -> None:
        """Passes that a later one followed are whole."""
        begun = {epoch: rows for epoch, rows in self._rows.items() if _n_drawn(rows)}
        n_rows = max(map(len, begun.values()), default=0)
        for epoch in sorted(begun)[:-1]:
            if (n := _n_drawn(begun[epoch])) != n_rows:
                text = f"each pass draws every row before the next begins: {n} of {n_rows} in pass {epoch}"
                self.file.add("I4", text, epoch=epoch)


def _n_drawn(rows: bytearray) -> int:
    return len(rows) - rows.count(0)
