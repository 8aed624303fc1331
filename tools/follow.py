"""Reads a run's growing journal, merged by wall time, up to `HOLD_S` before now, so that no line is late."""

import gzip
import heapq
import math
import os
import signal
import sys
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path

from areal_bus.storage.journal_segments import exists, open_segment, segment
from tools import run
from tools.run import Line, Run, event_of, is_number, parse

HOLD_S = (
    1.5  # a process appends its lines at once; this leaves time for the clocks of two hosts and for the file system
)
QUIET_S = 10.0  # after the head's end line other actors may write their last lines


@dataclass(slots=True)
class Place:
    """How far a journal is read."""

    number: int = 0  # of its file
    n_bytes: int = 0  # read of this file
    n_lines: int = 0  # the same: a compressed file may have fewer bytes in a line

    def lines(self, path: Path) -> Iterator[bytes]:
        """New whole lines over all files. A line counts as read when the next one is asked for."""
        is_finished = True
        while is_finished:
            is_finished = exists(path, self.number + 1)  # before it is read: nothing is appended to it any more
            with self._open(path) as file:
                for raw in file:
                    if not raw.endswith(b"\n"):
                        break  # incomplete: read again by the next call, unless another file follows
                    yield raw
                    self.n_bytes += len(raw)
                    self.n_lines += 1
            if is_finished:
                self.number, self.n_bytes, self.n_lines = self.number + 1, 0, 0

    def _open(self, path: Path) -> BufferedIOBase:
        """The file, where the reading goes on."""
        file = open_segment(path, self.number)
        if isinstance(file, gzip.GzipFile):
            for _ in range(self.n_lines):
                file.readline()
        else:
            file.seek(self.n_bytes)
        return file


@dataclass(slots=True)
class JournalFollower:
    """Follows the journal of one run. New files of later incarnations are found at every call."""

    where: Run
    events: Collection[str]
    _places: dict[Path, Place] = field(default_factory=dict)  # how far each journal is read
    _wanted: frozenset[bytes] = frozenset()

    def __post_init__(self) -> None:
        self._wanted = frozenset(name.encode() for name in self.events)

    def read(self, until: float = math.inf) -> Iterator[Line]:
        """New lines with a wall time up to `until`, merged. Finish the iteration before the next call."""
        streams = [self._file(path, until) for path in self.where.journals()]
        return heapq.merge(*streams, key=lambda line: float(line["wall"]))

    def _file(self, path: Path, until: float) -> Iterator[Line]:
        for raw in self._places.setdefault(path, Place()).lines(path):
            line = self._parse(raw, path)
            if line is not None and line["wall"] > until:
                return
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
            place = self._places[path]
            print(f"{segment(path, place.number)}: skipped broken line {place.n_lines + 1}", file=sys.stderr)
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
