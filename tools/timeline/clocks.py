"""The clocks of a run's hosts, aligned to the clock of the head.

`t` is monotonic within a host. Heartbeats carry no time, but other messages bound the offset between two hosts: their
lines are written before they are sent and after they arrive. The head's `lease` comes before the generator's `request`,
the generator's `completion` before the head's `sampled`, and so on. The pair with the least delay in each direction
gives the tightest bounds. The offset is their middle, its error half their distance (the rule of NTP, RFC 5905).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools import run
from tools.run import Line, Run

SAME_S = 1.0  # two processes whose clocks differ by less from the wall clock are on one host, where none is named
REBOOT_S = 60.0  # the clock of a host that differs by more from the wall clock than before is another clock
BEFORE = {"request": "lease", "score": "lease", "pushed": "push"}  # event of an actor -> of the head, sent before it
AFTER = {"completion": "sampled", "score": "scored"}  # event of an actor -> of the head, after it
AFTER_NOW = AFTER | {"step": "update"}  # in journals whose start lines have a host; before, `step` was written late
LEDGER = ("lease", "sampled", "scored", "update", "push")

Name = str
Key = tuple[Any, ...]


@dataclass(slots=True)
class Clock:
    """One host's clock: time of the head = t + offset_s."""

    host: str
    low: float = -math.inf
    high: float = math.inf
    is_heads: bool = False
    is_named: bool = True  # its host is in the journal
    wall_offset_s: float = 0.0  # by the wall clocks of both hosts

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.low) and math.isfinite(self.high)

    @property
    def offset_s(self) -> float:
        """Add it to `t` of this host."""
        if self.is_heads:
            return 0.0
        return (self.low + self.high) / 2 if self.is_bounded else self.wall_offset_s

    @property
    def error_s(self) -> float | None:
        """Largest error of the offset; None: not known, the wall clocks are used. A drift between hosts adds to it."""
        if self.is_heads:
            return 0.0
        return abs(self.high - self.low) / 2 if self.is_bounded else None

    @property
    def sentence(self) -> str:
        if self.is_heads:
            return f"{self.host}: the clock of the head"
        if self.error_s is None:
            return f"{self.host}: aligned by wall clocks, error not known (too few messages to bound it)"
        drift = " and the drift of the clocks, which contradict each other" if self.low > self.high else ""
        return f"{self.host}: offset {self.offset_s:.6f} s, error at most {self.error_s * 1e3:.3f} ms{drift}"


@dataclass(slots=True)
class Clocks:
    """The clock of every start of every process."""

    all: list[Clock] = field(default_factory=list)
    of: dict[tuple[Name, int], Clock] = field(default_factory=dict)  # (file, number of its start line)

    def offset(self, name: Name, start: int) -> float:
        """Seconds to add to `t` in this file after its start line of this number (0: it began while this was read)."""
        clock = self.of.get((name, start))
        return 0.0 if clock is None else clock.offset_s


def read_clocks(where: Run) -> Clocks:
    clocks = Clocks()
    hosts = {line["name"]: str(line["host"]) for path in where.journals("head") for line in run.lines(path, "joined")}
    bases: dict[str, list[tuple[float, Clock]]] = {}  # boot and host -> (wall - t, clock)
    heads_base: float | None = None
    for path in [*where.journals("head"), *(path for path in where.journals() if not path.name.startswith("head-"))]:
        name = path.name.removesuffix(".jsonl")
        for number, line in enumerate(run.lines(path, "start")):
            base = line["wall"] - line["t"]
            host = line.get("host") or hosts.get(name)
            if heads_base is None:
                heads_base = base
            is_heads_clock = bool(clocks.all) and abs(base - heads_base) < SAME_S
            if is_heads_clock and (host is None or not clocks.all[0].is_named):  # a journal of an older version
                clocks.of[name, number] = clocks.all[0]
                continue
            boot = str(line.get("machine", "")).partition(" ")[0]  # tells apart machines with one host name
            known = bases.setdefault(f"{boot} {host or name}", [])
            clock = next((clock for other, clock in known if abs(other - base) < REBOOT_S), None)
            if clock is None:
                is_first, label = not clocks.all, host or f"host of {name}"
                clock = Clock(label, is_heads=is_first, is_named=bool(host), wall_offset_s=base - heads_base)
                clocks.all.append(clock)
                known.append((base, clock))
            clocks.of[name, number] = clock
    if len(clocks.all) > 1:
        _bound(where, clocks)
    return clocks


def _bound(where: Run, clocks: Clocks) -> None:
    """Narrow the bounds of every other clock by the messages between its processes and the head."""
    times = _head_times(where, clocks)
    for path in where.journals():
        name = path.name.removesuffix(".jsonl")
        if name.startswith("head-"):
            continue
        after = AFTER_NOW if any("host" in line for line in run.lines(path, "start")) else AFTER
        for start, line in _with_start(path, *{*BEFORE, *after}):
            clock = clocks.of.get((name, start))
            if clock is None or clock.is_heads or line.get("evaluation"):
                continue
            event = line["event"]
            sent = times.get(_key(BEFORE[event], line)) if event in BEFORE else None
            received = times.get(_key(after[event], line)) if event in after else None
            if sent is not None:
                clock.low = max(clock.low, sent - line["t"])
            if received is not None:
                clock.high = min(clock.high, received - line["t"])


def _head_times(where: Run, clocks: Clocks) -> dict[Key, float]:
    """Time of the head's line about each message; None of those that are on another clock than the first head."""
    times: dict[Key, float] = {}
    for path in where.journals("head"):
        name = path.name.removesuffix(".jsonl")
        for start, line in _with_start(path, *LEDGER):
            if clocks.of[name, start].is_heads and not line.get("evaluation"):
                times.setdefault(_key(line["event"], line), line["t"])
    return times


def _key(event: str, line: Line) -> Key:
    if event == "lease":
        return event, line["uid"], line["attempt"]
    if event == "update":
        return event, line.get("term"), line["version"]
    if event == "push":
        return event, line.get("term"), line["push"]
    return event, line["uid"], line["sample"], line["attempt"]


def _with_start(path: Path, *names: str) -> Iterator[tuple[int, Line]]:
    """The lines of these events with the number of the start line before them, from 0."""
    start = -1
    for line in run.lines(path, "start", *names):
        if line["event"] == "start":
            start += 1
        else:
            yield max(start, 0), line
