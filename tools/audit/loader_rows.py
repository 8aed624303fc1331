"""Rows of a user's loader by digest: a number is one row, and no row comes again after a resume (I4)."""

from tools.audit.journal_reader import JournalFile

Pass = tuple[str, int]  # source, epoch
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
                text = (
                    f"a resumed loader goes on after its last row: row {row} of pass {at[1]} equals row {first}, drawn "
                    "in an earlier term, and no two rows of one term are equal"
                )
                self.file.add("I4", text, uid=uid)
