"""State that the workers of one host share: replies of the judge, the budget spent, and the calls in flight.

Replies and budget are in an SQLite file, which outlives the run's processes. A call in flight holds the lock of one of
`max_concurrent` files; the kernel releases it when its process is killed.
"""

import fcntl
import random
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

BUSY_S = 30.0  # longest wait for another process's transaction
POLL_S = 0.02  # between two looks for a free slot
TABLES = """
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""


class BudgetSpent(Exception):
    """The budget of judge calls of this run is spent."""


class NoSlot(Exception):
    """Other calls held all slots until the deadline of the score."""


class JudgeStore:
    """The files below one folder. Opens the database for each access, so that a fork may use it, too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._file = folder, folder / "judge.sqlite3"
        with self._open() as database:
            database.executescript(TABLES)

    def reply(self, key: str) -> str | None:
        """The kept reply, or None."""
        with self._open() as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, reply: str) -> None:
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def reserve(self, *, max_calls: int | None, max_tokens: int | None) -> None:
        """Count one call. Raises BudgetSpent when all calls are used, or the tokens of earlier ones reach the limit."""
        limits = (max_calls, max_calls, max_tokens, max_tokens)
        with self._open() as database:
            change = "UPDATE spent SET calls = calls + 1 WHERE (? IS NULL OR calls < ?) AND (? IS NULL OR tokens < ?)"
            if database.execute(change, limits).rowcount:
                return
            calls, tokens = database.execute("SELECT calls, tokens FROM spent").fetchone()
        raise BudgetSpent(
            f"the budget of the judge is spent on this host: {calls} calls of reward.judge.max_calls = {max_calls}, "
            f"{tokens} tokens of max_budget_tokens = {max_tokens}"
        )

    def give_back(self) -> None:
        """The reserved call had no answer: it costs nothing."""
        with self._open() as database:
            database.execute("UPDATE spent SET calls = calls - 1")

    def add_tokens(self, n: int) -> None:
        with self._open() as database:
            database.execute("UPDATE spent SET tokens = tokens + ?", (n,))

    def spent(self) -> tuple[int, int]:
        """Answered calls (and those in flight), and their tokens."""
        with self._open() as database:
            calls, tokens = database.execute("SELECT calls, tokens FROM spent").fetchone()
        return int(calls), int(tokens)

    @contextmanager
    def slot(self, n_slots: int, *, deadline: float) -> Iterator[None]:
        """Hold one of the slots. Raises NoSlot when none is free before `deadline` (time.monotonic)."""
        paths = [self._folder / f"slot-{i}" for i in range(n_slots)]
        while True:
            for path in random.sample(paths, len(paths)):
                with path.open("ab") as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    except BlockingIOError:
                        continue
                    yield
                    return
            if time.monotonic() >= deadline:
                raise NoSlot(f"reward.judge.max_concurrent = {n_slots} calls were in flight until the score's deadline")
            time.sleep(POLL_S)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """One transaction."""
        with closing(sqlite3.connect(self._file, timeout=BUSY_S)) as database, database:
            yield database
