"""The journal: one flat JSON line an event, one file a process, append-only.

Lines are written to a file opened for appending, whole ones with one write, so that what was written survives kill -9
of the process. The schema is in docs/journal.md.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from areal_bus.core.events import Event


class LineFile:
    """One write for all lines of an `append`. One that the disk does not take is lost, and the run goes on; people hear
    of it once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.n_lost = 0
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        self._is_torn = size > 0 and os.pread(self._file, 1, size - 1) != b"\n"  # the last line was written in part

    def append(self, *lines: bytes) -> None:
        """Lines without their ends. After half a line the next one begins on a line of its own."""
        data = b"\n".join((b"", *lines, b"") if self._is_torn else (*lines, b""))
        try:
            n_written = os.write(self._file, data)
        except OSError as error:
            self._lose(len(lines), os.strerror(error.errno or 0))
            return
        n_ends = data.count(b"\n", n_written)
        self._is_torn = n_ends > 0 and data[n_written - 1 : n_written] != b"\n"
        if n_ends:
            self._lose(n_ends, "no space is left for them")

    def close(self) -> None:
        os.close(self._file)

    def _lose(self, n_lines: int, why: str) -> None:
        is_first, self.n_lost = not self.n_lost, self.n_lost + n_lines
        if is_first:
            print(f"warning: {self.path.name} loses lines: {why}", file=sys.stderr, flush=True)


SCHEMA = 1
MOST_KEPT = 256  # lines that wait for one write
compact = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


class Journal:
    """Appends events of one process. Not thread-safe: each process writes from one thread."""

    def __init__(self, folder: Path, *, role: str, index: int, incarnation: int, term: int = 0) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{role}-{index}.{incarnation}.jsonl"
        self.term = term
        self._who = {"role": role, "rank": index, "inc": incarnation}
        self._seq = 0
        self._kept: list[bytes] = []
        self._file = LineFile(self.path)
        self._began = self._marked = self._flushed = time.monotonic()
        self._label = "start"
        self._spans: dict[str, float] = {}
        self.write(Event.START, schema=SCHEMA, pid=os.getpid())

    def write(self, event: Event, **fields: Any) -> None:
        """One line, after those that were kept; `fields` are flat: numbers, strings, or short lists of numbers.

        One that the disk does not take is lost, and the run goes on: readers see the gap in `seq`.
        """
        self.keep(event, **fields)
        self.flush()

    def keep(self, event: Event, **fields: Any) -> None:
        """One line that goes to the file with the next `write` or `flush`: before anybody hears what it says."""
        line = {
            "t": round(time.monotonic(), 6),
            "wall": round(time.time(), 6),
            "term": self.term,
            **self._who,
            "seq": self._seq,
            "event": str(event),
            **fields,
        }
        self._seq += 1
        self._kept.append(compact(line).encode())
        if len(self._kept) >= MOST_KEPT:
            self.flush()

    def flush(self) -> None:
        """What was kept is in the file, as far as the disk takes it, when this returns."""
        if self._kept:
            lines, self._kept = self._kept, []
            self._file.append(*lines)

    @property
    def n_lost(self) -> int:
        """Lines that the disk did not take."""
        return self._file.n_lost

    def mark(self, label: str) -> None:
        """From now on time is spent on `label`. Every second of a process has exactly one label (I12)."""
        now = time.monotonic()
        self._spans[self._label] = self._spans.get(self._label, 0.0) + now - self._marked
        self._marked, self._label = now, label
        if now - self._flushed >= 1.0:
            self._write_spans(now)

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Time inside is `label`; afterwards it is what it was before."""
        before = self._label
        self.mark(label)
        try:
            yield
        finally:
            self.mark(before)

    def close(self, **fields: Any) -> None:
        """The last spans and the END line."""
        self.mark("end")
        self._write_spans(time.monotonic())
        self.write(Event.END, wall_s=round(time.monotonic() - self._began, 6), **fields)
        self._file.close()

    def _write_spans(self, now: float) -> None:
        spent = {f"s_{label}": round(seconds, 6) for label, seconds in self._spans.items() if seconds > 0}
        self._flushed = now
        self._spans = {}
        if spent:
            self.write(Event.SPANS, **spent)
