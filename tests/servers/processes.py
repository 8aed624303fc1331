"""Finds the processes of real servers, for tests that kill one and watch it end."""

import os
from collections.abc import Iterator
from pathlib import Path

from actors.engines.servers.server_process import KEEPER


def servers_of(run: Path, module: str) -> list[int]:
    """Processes that run this Python module with a path of the run's folder; not those that watch over them."""
    inside, found = str(run).encode(), []
    for pid in pids():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:  # it has just ended
            continue
        is_keeper = any(word.endswith(KEEPER.name.encode()) for word in words)
        if module.encode() in words and not is_keeper and any(word.startswith(inside) for word in words):
            found.append(pid)
    return found


def session(leader: int) -> list[int]:
    """All processes of a session: those of one server."""
    found = []
    for pid in pids():
        try:
            if os.getsid(pid) == leader:
                found.append(pid)
        except OSError:  # it has just ended
            continue
    return found


def pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
