"""The journal: one flat JSON line per event, in whole lines, so that kill -9 loses none written (docs/journal.md).

Events carry this process's CPU time and (Linux) the time that its loop waited for a core.
"""

import contextlib
import json
import os
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import process_time
from typing import Any

from areal_bus import __version__
from areal_bus.core.events import Event
from areal_bus.foreign_text import cut, valid
from areal_bus.storage import journal_chain
from areal_bus.storage.journal_segments import ONE_FILE, FileSizes, SegmentedFile
from areal_bus.storage.machine import machine

MAX_STAT_BYTES = 1 << 16  # of one file
SCHEDSTAT = "schedstat"  # nanoseconds on a core, nanoseconds runnable without one, time slices


class CpuTimes:
    """Differences since the last call. Use it on the thread whose waits count."""

    def __init__(self) -> None:
        self._schedstat = LoopSchedstat()
        self._own_s = process_time()
        self._waited_s = self._schedstat.wait_s()
        self._children = children_cpu_s()

    def since_last(self) -> dict[str, float]:
        """`cpu_s`: CPU seconds of threads and direct children. `cpu_wait_s`: runnable without a core, where counted."""
        own_s, children, waited_s = process_time(), children_cpu_s(), self._schedstat.wait_s()
        of_children_s = sum(max(0.0, cpu_s - self._children.get(pid, 0.0)) for pid, cpu_s in children.items())
        found = {"cpu_s": round(own_s - self._own_s + of_children_s, 6)}
        if waited_s is not None:
            found["cpu_wait_s"] = round(waited_s - (self._waited_s or 0.0), 6)
        self._own_s, self._children, self._waited_s = own_s, children, waited_s
        return found

    def close(self) -> None:
        """Close the open file. `since_last` still counts CPU time."""
        self._schedstat.close()


class LoopSchedstat:
    """The scheduler's counters of the creating thread. The file stays open: a look costs one system call."""

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(f"/proc/thread-self/{SCHEDSTAT}", os.O_RDONLY | os.O_CLOEXEC)
            self._closing = weakref.finalize(self, os.close, self._descriptor)
            self._closing.atexit = False

    def wait_s(self) -> float | None:
        """Seconds that the thread has been runnable without a core. None where that is not counted."""
        if self._descriptor is None:
            return None
        try:
            return int(os.pread(self._descriptor, MAX_STAT_BYTES, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        if self._descriptor is not None:
            self._descriptor = None
            self._closing()


def children_cpu_s() -> dict[bytes, float]:
    """Process id of each child -> CPU seconds of its main thread. A child that ends in between is left out."""
    found: dict[bytes, float] = {}
    if not has_children():
        return found
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                for pid in read_small(f"/proc/self/task/{thread}/children").split():
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        found[pid] = int(read_small(f"/proc/{int(pid)}/{SCHEDSTAT}").split()[0]) / 1e9
    return found


def has_children() -> bool:
    """Whether this process has a child, one that has ended included. Reaps none. False where waitid is missing."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: no /proc to read either
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def read_small(path: str) -> bytes:
    """The content of a small file of the kernel. (`Path.read_text` takes three times as long.) Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MAX_STAT_BYTES)
    finally:
        os.close(descriptor)


SCHEMA = 1
MAX_BUFFERED = 256  # lines that are written together
WINDOW_S = 1.0  # about the time between two spans lines
TIMED_S = 0.02  # spans of this length or longer have their times in the spans line: at most 50 a second
TEXT_CHARACTERS = 4000  # of a field
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
compact = json.JSONEncoder(separators=(",", ":"), allow_nan=True).encode


class Journal:
    """Appends the events of one process. Not thread-safe: each process writes from one thread."""

    def __init__(
        self,
        folder: Path,
        *,
        role: str,
        index: int,
        incarnation: int,
        term: int = 0,
        sizes: FileSizes = ONE_FILE,
    ) -> None:
        """Open its newest file and write the start line. OSError: first incarnation only; others may lack a file."""
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{role}-{index}.{incarnation}.jsonl"
        self.term = term
        self._who = {"role": role, "rank": index, "inc": incarnation}
        self._seq = 0
        self._buffered: list[bytes] = []
        self._chain = journal_chain.end_of(self.path)
        self._file = SegmentedFile(self.path, sizes, may_fail=incarnation > 0)
        self._started = self._marked = self._began = self._flushed = time.monotonic()
        self._label = "start"
        self._spans: dict[str, float] = {}
        self._parts: dict[str, float] = {}  # LABEL:PART -> seconds counted by `count_part`
        self._timed: dict[str, list[int]] = {}  # label -> begin, length, ... in microseconds of this window
        self._cpu = CpuTimes()
        self._cpu_s: dict[str, float] = {}  # counted and not written
        began = {"t": round(self._started, 6)}  # labels count from here: a busy machine may stop us before the line
        about = {"pid": os.getpid(), "host": socket.gethostname(), "machine": machine(), "cores": n_cores()}
        before = "" if self._chain else journal_chain.follows(self.path)  # a later start goes on in its own file
        self._chain = self._chain or before.partition("=")[2]
        joins: dict[str, Any] = {"code": __version__, "follows": before}
        if role == "head":
            joins["seals"] = journal_chain.seals(self.path)
        self.write(Event.START, **began, schema=SCHEMA, **about, **joins)

    def write(self, event: Event, **fields: Any) -> None:
        """Write one line, after the buffered ones. `fields` are flat: numbers, strings or short lists of numbers.

        A line that cannot be written is lost and the run continues: readers see the gap in `seq`.
        """
        self.keep(event, **fields)
        self.flush()

    def keep(self, event: Event, **fields: Any) -> None:
        """Buffer one line until the next `write` or `flush`. Call one of them before you send its consequences."""
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
        self._buffered.append(encoded(line))
        if len(self._buffered) >= MAX_BUFFERED:
            self.flush()

    def flush(self) -> None:
        """Write the buffered lines."""
        if self._buffered:
            lines, self._buffered = self._buffered, []
            n_lost, links = self.n_lost, list(journal_chain.chained(self._chain, lines))
            self._file.append(*(line for line, _ in links))
            self._chain = links[-1][1] if self.n_lost == n_lost else journal_chain.end_of(self.path)

    @property
    def n_lost(self) -> int:
        """Number of lines that could not be written."""
        return self._file.n_lost

    def mark(self, label: str) -> None:
        """Time from now on counts as `label`: each second has one (I12). LABEL:CAUSE: LABEL, waiting for this cause."""
        now = time.monotonic()
        self._spans[self._label] = self._spans.get(self._label, 0.0) + now - self._marked
        is_over = now - self._flushed >= WINDOW_S
        if is_over or label != self._label:
            if now - self._began >= TIMED_S:
                begin, length = (int(seconds * 1e6) for seconds in (self._began - self._flushed, now - self._began))
                self._timed.setdefault(self._label, []).extend((begin, length))
            self._began = now
        self._marked, self._label = now, label
        if is_over:
            self._count_cpu()
            self._write_spans(now)

    def count_part(self, label: str, part: str, seconds: float) -> None:
        """Count seconds of the current label as a part of it, without their times. Call it while the label lasts."""
        if seconds > 0:
            name = f"{label}:{part}"
            self._parts[name] = self._parts.get(name, 0.0) + seconds

    @contextmanager
    def span(self, label: str) -> Iterator[None]:
        """Time in this block counts as `label`; afterwards the previous label continues."""
        before = self._label
        self.mark(label)
        try:
            yield
        finally:
            self.mark(before)

    def close(self, **fields: Any) -> None:
        """Write the last spans and the END line."""
        self._count_cpu()  # before the last mark: it takes a part of a millisecond
        self.mark("end")
        self._write_spans(self._marked)
        self.write(Event.END, wall_s=round(time.monotonic() - self._started, 6), **fields)
        self._file.close()
        self._cpu.close()

    def _count_cpu(self) -> None:
        for name, seconds in self._cpu.since_last().items():
            self._cpu_s[name] = round(self._cpu_s.get(name, 0.0) + seconds, 6)

    def _write_spans(self, now: float) -> None:
        spent: dict[str, float] = {}
        causes = {f"p_{name}": seconds for name, seconds in self._parts.items()}
        for label, seconds in self._spans.items():
            name, _, cause = label.partition(":")
            if seconds > 0:
                spent[f"s_{name}"] = spent.get(f"s_{name}", 0.0) + seconds
                if cause:
                    causes[f"w_{label}"] = seconds
        timed = {f"at_{label}": times for label, times in self._timed.items()}
        self._flushed = now
        self._spans, self._parts, self._timed = {}, {}, {}
        if spent:
            rounded = {key: round(seconds, 6) for key, seconds in (spent | causes).items()}
            until = {"t": round(now, 6)}  # labels count to here: a busy machine may stop us before the line
            self.write(Event.SPANS, **until, **rounded, **timed, **self._cpu_s, rss_bytes=resident_bytes())
            self._cpu_s = {}


def encoded(line: dict[str, Any]) -> bytes:
    """The line as JSON. Its texts are valid Unicode of at most TEXT_CHARACTERS: user code or a peer wrote some."""
    text = compact(line)
    if len(text) > TEXT_CHARACTERS or "\\ud" in text:
        text = compact({k: valid(cut(v, TEXT_CHARACTERS)) if isinstance(v, str) else v for k, v in line.items()})
    return text.encode()


def n_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def resident_bytes() -> int:
    """Memory of this process that is in RAM (Linux; 0 elsewhere)."""
    try:
        return int(read_small("/proc/self/statm").split()[1]) * PAGE_BYTES
    except OSError:
        return 0
