"""Finds out from /proc of this host whether the process that writes a journal runs, is stopped or is gone."""

import os
from collections.abc import Collection
from enum import StrEnum
from pathlib import Path

from areal_bus.storage.journal_segments import newest, segment
from areal_bus.storage.machine import machine

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
