"""Writes the events of a Chrome trace (JSON Array Format in an object) into a gzip file, as they come."""

import gzip
import json
from pathlib import Path
from types import TracebackType
from typing import Any

_encode = json.JSONEncoder(separators=(",", ":")).encode
MIN_US = 0.001  # a slice has a length, so that a flow can bind to it


class Window:
    """The part of the time that is written, in seconds since the start of the trace."""

    def __init__(self, begin: float, end: float) -> None:
        self.begin, self.end = begin, end

    def clip(self, begin: float, end: float) -> tuple[float, float] | None:
        """The part of the slice within the window; None if there is none."""
        if end < self.begin or begin > self.end:
            return None
        return max(begin, self.begin), min(end, self.end)


class TraceFile:
    """Events in, one gzip file out. Times are seconds since the start of the trace."""

    def __init__(self, path: Path, window: Window) -> None:
        self.path, self.window, self.n_events = path, window, 0
        self._file = gzip.open(path, "wt", encoding="utf-8", compresslevel=6)  # noqa: SIM115 - closed by __exit__
        self._file.write('{"displayTimeUnit":"ms","traceEvents":[')

    def __enter__(self) -> "TraceFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, _error: object, _trace: TracebackType | None) -> None:
        if kind is None:
            self._file.write("\n]}\n")
        self._file.close()

    def process(self, pid: int, name: str) -> None:
        """Name a process and place it in the order of its number."""
        self._write({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        self._write({"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}})

    def thread(self, pid: int, tid: int, name: str) -> None:
        """Name a track."""
        self._write({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
        self._write({"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}})

    def slice(self, place: tuple[int, int], name: str, begin: float, end: float, category: str, **args: Any) -> None:
        """A span on a track, clipped to the window."""
        part = self.window.clip(begin, end)
        if part is not None:
            pid, tid = place
            length = max((part[1] - part[0]) * 1e6, MIN_US)
            event = {"ph": "X", "name": name, "cat": category, "pid": pid, "tid": tid}
            self._write(event | {"ts": _us(part[0]), "dur": round(length, 3), "args": args})

    def instant(self, place: tuple[int, int], name: str, at: float, **args: Any) -> None:
        """A moment on a track."""
        if self.window.clip(at, at) is not None:
            event = {"ph": "i", "s": "t", "name": name, "cat": "event", "pid": place[0], "tid": place[1]}
            self._write(event | {"ts": _us(at), "args": args})

    def counter(self, pid: int, name: str, at: float, value: float) -> None:
        """A value from this time on."""
        if self.window.clip(at, at) is not None:
            self._write({"ph": "C", "name": name, "pid": pid, "ts": _us(at), "args": {"value": value}})

    def flow(self, number: int, anchors: list[tuple[tuple[int, int], float]]) -> None:
        """Arrows through slices: (track, a time within the slice), in order; two or more."""
        for index, (place, at) in enumerate(anchors):
            phase = "s" if index == 0 else "f" if index == len(anchors) - 1 else "t"
            event = {"ph": phase, "bp": "e", "name": "trajectory", "cat": "trajectory", "id": number}
            self._write(event | {"pid": place[0], "tid": place[1], "ts": _us(at)})

    def _write(self, event: dict[str, Any]) -> None:
        self._file.write(("\n" if not self.n_events else ",\n") + _encode(event))
        self.n_events += 1


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
