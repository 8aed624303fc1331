"""Finds out from /proc of this host whether the process that writes a journal runs, is stopped or is gone."""

import os
import socket
from enum import StrEnum
from pathlib import Path

from areal_bus.storage.journal_segments import newest, segment

PROC = Path("/proc")


class Process(StrEnum):
    RUNS = "runs"
    STOPPED = "stopped"  # SIGSTOP, or a debugger
    GONE = "gone"
    UNKNOWN = ""  # on another host, or of another user


def process_of(journal: Path, pid: int, host: str) -> Process:
    """State of the process that writes this journal. `host`: where it ran; "" if unknown.

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
        return Process.GONE if host == socket.gethostname() else Process.UNKNOWN
    return Process.STOPPED if state in ("T", "t") else Process.RUNS


def _holds(process: Path, path: Path) -> bool:
    return any(_leads_to(link, path) for link in (process / "fd").iterdir())


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return os.path.samestat(link.stat(), path.stat())
    except OSError:
        return False
