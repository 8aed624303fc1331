"""Reads a run's growing journal: each call returns the lines that were appended since the last call.

Lines of several files are merged by wall time. A file is read up to `HOLD_S` before now, so that a line of another
process with an earlier time is never late. An incomplete last line waits until it is complete.
"""

import heapq
import math
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tools import run
from tools.run import Line, Run, event_of, is_number, parse

HOLD_S = (
    1.5  # a process appends its lines at once; this leaves time for the clocks of two hosts and for the file system
)
QUIET_S = 10.0  # after the head's end line other actors may write their last lines


@dataclass(slots=True)
class JournalFollower:
    """Follows the journal of one run. New files of later incarnations are found at every call."""

    where: Run
    events: Collection[str]
    _offsets: dict[Path, int] = field(default_factory=dict)  # bytes read of each file
    _wanted: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        self._wanted = frozenset(name.encode() for name in self.events)

    def read(self, until: float = math.inf) -> Iterator[Line]:
        """New lines with a wall time up to `until`, merged. Finish the iteration before the next call."""
        streams = [self._file(path, until) for path in self.where.journals()]
        return heapq.merge(*streams, key=lambda line: float(line["wall"]))

    def _file(self, path: Path, until: float) -> Iterator[Line]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            for raw in file:
                if not raw.endswith(b"\n"):
                    return  # incomplete: read again by the next call
                line = self._parse(raw, path)
                if line is not None and line["wall"] > until:
                    return
                self._offsets[path] = self._offsets.get(path, 0) + len(raw)
                if line is not None:
                    yield line

    def _parse(self, raw: bytes, path: Path) -> Line | None:
        """The line if its event is wanted. A broken line is skipped with a message on standard error."""
        event = event_of(raw)
        if event and event not in self._wanted:
            return None
        try:
            value = parse(raw)
        except ValueError:
            value = None
        if isinstance(value, dict) and is_number(value.get("wall")) and isinstance(value.get("event"), str):
            return value if value["event"] in self.events else None
        if raw.strip():
            print(f"{path}: skipped a broken line at byte {self._offsets.get(path, 0)}", file=sys.stderr)
        return None


def stopped_by(*, end_of_input: bool) -> threading.Event:
    """Is set by SIGTERM, by Ctrl-C and, if asked for, at the end of standard input."""
    stopped = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopped.set())
    if end_of_input:
        threading.Thread(target=_wait_for_eof, args=(stopped,), daemon=True).start()
    return stopped


def _wait_for_eof(stopped: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    stopped.set()


def is_over(where: Run, now: float) -> bool:
    """Whether the newest head ended some time ago."""
    heads = where.journals("head")
    last = max(run.lines(heads[-1], "start", "end"), key=lambda line: float(line["wall"])) if heads else {}
    return last.get("event") == "end" and now - float(last["wall"]) > QUIET_S
