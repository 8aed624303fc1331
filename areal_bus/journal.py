"""What happened, one flat JSON line an event, one file a process; knows nothing of who reads it.

Lines are written to a file opened for appending, whole ones with one write, so that what was written survives kill -9
of the process. The schema is in docs/journal.md.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

from areal_bus.lines import LineFile

SCHEMA = 1
MOST_KEPT = 256  # lines that wait for one write
compact = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


class Event(StrEnum):
    """Names of all events; docs/journal.md says which fields each has."""

    START = "start"  # every process: first line
    END = "end"  # every process: last line of an orderly end
    SPANS = "spans"  # seconds by label since the last such line; labels do not overlap
    FAILED = "failed"
    NOTE = "note"
    # head: membership
    JOINED = "joined"
    MEMBER = "member"  # a change of state
    # head: terms
    TERM = "term"  # a life of the learner begins: where the ledger goes back to, or on from
    # head: prompts
    ADMIT = "admit"
    LEASE = "lease"
    SAMPLED = "sampled"
    SCORED = "scored"
    REFUSED = "refused"  # an impossible or late event, by rule
    REFUND = "refund"
    READY = "ready"  # a whole group is scored
    BATCH = "batch"
    TRAJECTORY = "trajectory"  # one line a trajectory of a batch
    UPDATE = "update"
    PUBLISH = "publish"
    EVALUATION = "evaluation"
    # head: who waits for whom
    WAIT = "wait"  # one line a wait of the register, when that changed
    STALL = "stall"  # nothing, or somebody at work, has not moved for long
    # pushes: head, learner and generator
    PUSH = "push"
    PUSHED = "pushed"
    PUSH_BROKEN = "push_broken"
    # generator
    REQUEST = "request"
    COMPLETION = "completion"
    # reward
    SCORE = "score"
    # learner
    STEP = "step"
    CHECKPOINT = "checkpoint"
    EXPORT = "export"
    WARMUP = "warmup"


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
