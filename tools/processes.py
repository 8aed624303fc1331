"""Whether the process behind a journal file runs, is stopped or is gone, by /proc of this host."""

import os
import socket
from enum import StrEnum
from pathlib import Path

PROC = Path("/proc")


class Process(StrEnum):
    RUNS = "runs"
    STOPPED = "stopped"  # SIGSTOP, or a debugger
    GONE = "gone"
    UNKNOWN = ""  # on another host, or of another user


def process_of(journal: Path, pid: int, host: str) -> Process:
    """The process that writes this file. `host`: where it ran, "" when nobody wrote that down.

    A process id may be another process's by now, or another host's: one that has the file open is the right one.
    """
    folder = PROC / str(pid)
    try:
        holds = any(_leads_to(link, journal) for link in (folder / "fd").iterdir())
        state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
    except PermissionError:
        return Process.UNKNOWN
    except OSError:
        holds, state = False, ""
    if not holds or state in ("Z", "X"):
        return Process.GONE if host == socket.gethostname() else Process.UNKNOWN
    return Process.STOPPED if state in ("T", "t") else Process.RUNS


def _leads_to(link: Path, path: Path) -> bool:
    try:
        return os.path.samestat(link.stat(), path.stat())
    except OSError:
        return False
