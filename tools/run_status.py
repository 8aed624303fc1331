"""What a journal states about the ring: the head's last incarnation, and the starts of every actor."""

import os
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from areal_bus.storage.journal_segments import newest, segment
from areal_bus.storage.machine import machine
from tools.run import Line, Run, is_number, journal_folder

MAX_SHOWN = 5

HEAD_EVENTS = (
    "start",
    "end",
    "failed",
    "member",
    "joined",
    "term",
    "update",
    "publish",
    "refused",
    "wait",
    "stall",
)
TEXTS = {  # text fields that are read, by event
    "wait": ("who", "what", "on", "detail", "verdict"),
    "stall": ("scope", "action", "verdict"),
    "refused": ("what", "sender", "why"),
    "member": ("name",),
    "joined": ("name",),
}
NUMBERS = {"wait": ("i", "n", "since_s"), "term": ("term", "version"), "update": ("version",), "publish": ("version",)}
Start = tuple[str, float, Path, int, str]  # name, wall, file, pid, machine; 0 and "": unknown


@dataclass(slots=True)
class HeadStatus:
    """The journal of the head's last incarnation, summarized."""

    version: int | None = None
    published: int | None = None
    term: int = 0
    states: dict[str, str] = field(default_factory=dict)
    waits: list[Line] = field(default_factory=list)  # the last complete register
    register: list[Line] = field(default_factory=list)  # the register that is being read
    stall: Line | None = None  # the current stall of the ring
    stalls: list[Line] = field(default_factory=list)  # the last stalls, also of members
    n_refused: int = 0
    refused: Line | None = None
    end: Line | None = None
    error: str = ""

    def take(self, line: Line) -> None:
        event = line["event"]
        if event in ("member", "joined"):
            self.states[line["name"]] = str(line.get("state", "joining"))
        elif event == "term":
            self.term, self.version, self.published = line["term"], line["version"], line["version"]
        elif event == "update":
            self.version = line["version"]
        elif event == "publish":
            self.published = line["version"]
        elif event == "refused":
            self.n_refused, self.refused = self.n_refused + 1, line
        elif event == "wait":
            self._register(line)
        elif event == "stall":
            self._stall(line)
        elif event == "failed" and "name" not in line:
            self.error = str(line.get("error", ""))
        elif event == "end":
            self.end = line

    def _register(self, line: Line) -> None:
        """Add a line to the register, which is valid when its last line exists."""
        self.register = [line] if line["i"] == 0 else [*self.register, line]
        if len(self.register) >= line["n"]:
            self.waits = self.register if line["n"] else []

    def _stall(self, line: Line) -> None:
        if line["scope"] == "ring":
            self.stall = None if line["action"] == "over" else line
        if line["action"] != "over":
            self.stalls = [*self.stalls, line][-MAX_SHOWN:]


@dataclass(slots=True)
class RunStatus:
    """The head and the starts of all actors of a run."""

    where: Run
    head: HeadStatus = field(default_factory=HeadStatus)
    _starts: dict[str, list[Start]] = field(default_factory=dict)  # by file name

    def take(self, line: Line) -> None:
        """Take a line of HEAD_EVENTS of any process."""
        if line["event"] == "start":
            self._add_start(line)
        if line.get("role") != "head":
            return
        if not _is_complete(line):
            print(f"skipped a damaged line of the head: {line.get('seq')} ({line['event']})", file=sys.stderr)
            return
        if line["event"] == "start":
            self.head = HeadStatus(n_refused=self.head.n_refused, refused=self.head.refused)
        self.head.take(line)

    def starts_by_actor(self) -> dict[str, list[Start]]:
        """The starts of each actor (generator-0), in order; of a file without a start line one at time 0."""
        found: dict[str, list[Start]] = {}
        for path in self.where.journals():
            name = path.name.removesuffix(".jsonl")
            starts = self._starts.get(name, [(name, 0.0, path, 0, "")])
            found.setdefault(name.rpartition(".")[0], []).extend(starts)
        return {place: sorted(starts, key=lambda start: start[1]) for place, starts in found.items()}

    def _add_start(self, line: Line) -> None:
        name = f"{line.get('role')}-{line.get('rank')}.{line.get('inc')}"
        pid = line.get("pid", 0)
        path = journal_folder(self.where.folder) / f"{name}.jsonl"
        pid, on = pid if isinstance(pid, int) else 0, str(line.get("machine", ""))
        self._starts.setdefault(name, []).append((name, float(line.get("wall", 0.0)), path, pid, on))


def _is_complete(line: Line) -> bool:
    """Whether all fields that are read here exist and have their type."""
    event = line["event"]
    are_texts = all(isinstance(line.get(key), str) for key in TEXTS.get(event, ()))
    return are_texts and all(is_number(line.get(key)) for key in ("wall", *NUMBERS.get(event, ())))


PROC = Path("/proc")


class Process(StrEnum):
    RUNS = "runs"
    STOPPED = "stopped"  # SIGSTOP, or a debugger
    GONE = "gone"
    UNKNOWN = ""  # on another host, or of another user


def process_of(journal: Path, pid: int, where: str) -> Process:
    """State of the process that writes this journal. `where`: its machine (areal_bus/storage/machine.py); "": unknown.

    A pid may belong to another process by now, or to one of another host: the right process has the file open.
    """
    folder = PROC / str(pid)
    try:
        holds = _holds(folder, segment(journal, newest(journal))) or _holds(folder, segment(journal, newest(journal)))
        state = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except PermissionError:
        return Process.UNKNOWN
    except OSError:
        holds, state = False, ""
    if not holds or state in ("Z", "X"):
        return Process.GONE if where and where == machine() else Process.UNKNOWN
    return Process.STOPPED if state in ("T", "t") else Process.RUNS


def stopped_below(pids: Collection[int]) -> dict[int, int]:
    """Stopped processes of this host that descend from one of these: stopped pid -> that one."""
    table = {int(folder.name): found for folder in PROC.glob("[0-9]*") if (found := _parent_and_state(folder))}
    below = {}
    for pid in [pid for pid, (_, state) in table.items() if state in ("T", "t") and pid not in pids]:
        above = table[pid][0]
        while above in table and above not in pids:
            above = table[above][0]
        if above in pids:
            below[pid] = above
    return below


def _parent_and_state(folder: Path) -> tuple[int, str] | None:
    try:
        state, parent = (folder / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[:2]
    except (OSError, ValueError):  # it has ended meanwhile
        return None
    return int(parent), state


def _holds(process: Path, path: Path) -> bool:
    return any(_leads_to(link, path) for link in (process / "fd").iterdir())


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return os.path.samestat(link.stat(), path.stat())
    except OSError:
        return False
