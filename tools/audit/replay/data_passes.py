"""Rows of the data by pass: each is drawn once, and again only after a refund that allows it (I4)."""

from collections import Counter

from areal_bus.core.rows import RowOrder
from tools.audit.journal_reader import JournalFile
from tools.audit.run_settings import RunSettings

FAR = 1 << 24  # largest row number: a damaged journal must not make us allocate more
MOST_AGAIN = 3
_WAITING = range(2, 2 * MOST_AGAIN + 2, 2)
_MOST = 250  # largest value of a row's byte

Pass = tuple[str, int]  # source ("" for the only one), epoch
Row = tuple[str, int, int]  # source, epoch, row


class LoaderRows:
    """Digests of rows. Equal rows in one term are the data's own; then repeats over terms prove nothing."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self._term = 0
        self._digests: dict[Row, str] = {}
        self._first: dict[tuple[Pass, str], tuple[int, int]] = {}  # where a digest came first: row, term
        self._with_equal_rows: set[Pass] = set()
        self._repeats: list[tuple[Pass, int, int, int]] = []  # pass, row, the earlier row, uid

    def draw(self, at: Row, digest: str, uid: int) -> None:
        source, epoch, row = at
        known = self._digests.setdefault(at, digest)
        if known != digest:
            text = f"a row that is drawn again is the same: row {row} of pass {epoch} is {digest}, it was {known}"
            self.file.add("I4", text, uid=uid)
        first, term = self._first.setdefault(((source, epoch), digest), (row, self._term))
        if first == row:
            return
        if term == self._term:
            self._with_equal_rows.add((source, epoch))
        else:
            self._repeats.append(((source, epoch), row, first, uid))

    def begin_term(self) -> None:
        self._term += 1

    def close(self) -> None:
        for at, row, first, uid in self._repeats:
            if at not in self._with_equal_rows:
                what = f"row {row} of pass {at[1]} equals row {first}, drawn in an earlier term"
                rule = "a resumed loader goes on after its last row"
                self.file.add("I4", f"{rule}: {what}, and no two rows of one term are equal", uid=uid)


class Passes:
    """One byte a row: 2 k + 1 after its k-th repeated draw, 2 k when that draw is allowed."""

    def __init__(self, file: JournalFile, setup: RunSettings) -> None:
        self.file, self.setup = file, setup
        self._rows: dict[Pass, bytearray] = {}
        self._n_drawn: Counter[str] = Counter()  # by source
        self._outside: set[Row] = set()  # rows whose group had a pass rate outside of the window
        self._n_waiting = 0  # rows to be drawn again
        self._of_loaders = LoaderRows(file)
        self._orders = {
            name: RowOrder(order.n_rows, seed=order.seed, shuffle=order.shuffle) for name, order in setup.orders.items()
        }

    def draw(self, at: Row, uid: int, digest: str = "") -> int:
        """In one pass each row is drawn once. Returns how often this one was drawn before."""
        source, epoch, row = at
        if digest:
            self._of_loaders.draw(at, digest, uid)
        if not 0 <= row < FAR or not 0 <= epoch < FAR:
            self.file.add("I4", f"a row is an index of the data, in a pass: row {row} of pass {epoch}", uid=uid)
            return 0
        rows = self._rows.setdefault((source, epoch), bytearray())
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
        if not before:
            self._follow_order(at, uid)
            self._take_turn(source, uid)
        rows[row] = min(before + 1 + before % 2, _MOST + 1)
        if rows[row] > 2 * MOST_AGAIN + 1:
            self.file.add("I4", f"a row is issued again at most {MOST_AGAIN} times: row {row} of pass {epoch}", uid=uid)
        return rows[row] // 2

    def _follow_order(self, at: Row, uid: int) -> None:
        """The k-th new row of a source is that of its seeded order."""
        source, epoch, row = at
        order = self._orders.get(source)
        due = None if order is None else order.row(self._n_drawn[source])
        if due is not None and due != (epoch, row):
            text = f"rows come in the order of run.seed: row {due[1]} of pass {due[0]}, not {row} of pass {epoch}"
            self.file.add("I4", text, uid=uid)

    def _take_turn(self, source: str, uid: int) -> None:
        """The next row comes from the source furthest behind its weight. In a limited run a source may have ended."""
        weights = dict(self.setup.sources)
        if weights and self.setup.n_passes is None:
            due = min(weights, key=lambda name: (self._n_drawn[name] + 0.5) / weights[name])
            if source != due:
                counts = {name: self._n_drawn[name] for name in weights}
                text = f"the source furthest behind its weight is next, {due!r}, not {source!r}: {counts} were drawn"
                self.file.add("I4", text, uid=uid)
        self._n_drawn[source] += 1

    def learn(self, at: Row, n_right: int, n_judged: int) -> None:
        """The group of this row was trained, or refunded for having no signal."""
        window = self.setup.window
        if window is not None and n_judged and not window.contains(n_right, n_judged):
            self._outside.add(at)

    def release(self, at: Row) -> None:
        """A row that became too old may be drawn again."""
        source, epoch, row = at
        rows = self._rows.get((source, epoch), bytearray())
        if row < len(rows) and rows[row] % 2:
            rows[row] = min(rows[row] + 1, _MOST)
            self._n_waiting += 1

    # terms

    def put_back(self, at: Row, *, n_before: int, is_drawn: bool) -> None:
        """Restore a row to the state before the `n`-th draw, which is undone or repeated."""
        source, epoch, row = at
        rows = self._rows.get((source, epoch), bytearray())
        if row < len(rows):
            self._n_drawn[source] -= rows[row] > 0
            rows[row] = 2 * n_before + is_drawn
            self._n_drawn[source] += rows[row] > 0

    def go_on_at(self, position: int) -> None:
        """After all rows are restored: the next new row follows the drawn ones."""
        self._of_loaders.begin_term()
        self._n_waiting = sum(rows.count(value) for rows in self._rows.values() for value in _WAITING)
        drawn = sum(map(_n_drawn, self._rows.values()))
        if position != drawn:
            text = f"a term draws on after the rows of its prompts: {drawn} are drawn, position is {position}"
            self.file.add("I4", text)

    # the end

    @property
    def n_reissued(self) -> int:
        """How often a row became available again."""
        values = range(2, _MOST + 2)
        return sum(rows.count(value) * (value // 2) for rows in self._rows.values() for value in values)

    def close(self) -> None:
        """A pass is complete if a later one followed."""
        self._of_loaders.close()
        for source in sorted({name for name, _ in self._rows}):
            begun = {epoch: rows for (name, epoch), rows in self._rows.items() if name == source and _n_drawn(rows)}
            if self.setup.window is not None and source not in self.setup.loaders:
                self._close_curriculum(source, begun, every=self.setup.window.every)
            else:
                self._close(source, begun)

    def _close(self, source: str, begun: dict[int, bytearray]) -> None:
        n_rows = max(map(len, begun.values()), default=0)
        for epoch in sorted(begun)[:-1]:
            most = len(begun[epoch]) if source in self.setup.loaders else n_rows  # a loader's passes may differ
            if (n := _n_drawn(begun[epoch])) != most:
                of = f" of source {source}" if source else ""
                text = f"each pass draws every row before the next begins: {n} of {most} in pass {epoch}{of}"
                self.file.add("I4", text, epoch=epoch)

    def _close_curriculum(self, source: str, begun: dict[int, bytearray], *, every: int) -> None:
        """A pass leaves out rows whose pass rate was outside the window in one of the `every - 1` passes before."""
        for epoch in range(max(begun, default=0)):
            before = range(max(0, epoch - every + 1), epoch)
            drawn = begun.get(epoch, bytearray())
            for row in range(max(map(len, begun.values()))):
                is_drawn = row < len(drawn) and drawn[row] > 0
                if not is_drawn and not any((source, earlier, row) in self._outside for earlier in before):
                    text = f"only rows outside of the pass-rate window are left out: row {row} of pass {epoch} is not"
                    self.file.add("I4", f"{text}, source {source!r}", epoch=epoch)


def _n_drawn(rows: bytearray) -> int:
    return len(rows) - rows.count(0)
