"""Finds the processes of a job on this machine and applies faults to them."""

import contextlib
import ctypes
import errno
import os
import random
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from actors.engines.servers import watch_parent
from areal_bus.messages import Role
from tools.run_status import Process, RunStatus, process_of

PIDFD_GETFD = 438  # of x86-64, arm64 and most others


@dataclass(frozen=True, slots=True)
class Victim:
    """A process that may suffer a fault."""

    name: str  # generator-0.1; of a server its generator's
    pid: int
    is_server: bool = False


def victims(status: RunStatus) -> list[Victim]:
    """The actors that run, and the engine servers of generators. Stopped ones are left out."""
    found = []
    for starts in status.starts_by_actor().values():
        name, _, journal, pid, where = starts[-1]
        if process_of(journal, pid, where) is Process.RUNS:
            found.append(Victim(name, pid))
            if name.startswith(f"{Role.GENERATOR}-"):
                found += [Victim(name, server, is_server=True) for server in servers_of(pid)]
    return found


def servers_of(generator: int) -> list[int]:
    """The engine servers that a generator has started: each has a keeper between (watch_parent.py)."""
    keepers = [pid for pid in children(generator) if watch_parent.__file__ in command_line(pid)]
    return [pid for keeper in keepers for pid in children(keeper)]


def choose(dice: random.Random, found: list[Victim]) -> Victim | None:
    """Each process is equally likely."""
    return dice.choice(sorted(found, key=lambda victim: (victim.name, victim.is_server))) if found else None


def children(pid: int) -> list[int]:
    found = set[int]()
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # it has ended
            found.update(map(int, task.read_text(encoding="utf-8").split()))
    return sorted(found)


def command_line(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def send(pid: int, number: signal.Signals) -> bool:
    """False when it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def cut(pid: int) -> int:
    """End all connections of a process over TCP and named unix sockets, as a network does; returns their number.

    The process keeps its descriptors and notices at its next read or write. Raises PermissionError where the system
    forbids pidfd_getfd(2) (ptrace of a process of one's own).
    """
    n_cut = 0
    for connection in connections(pid):
        with connection, contextlib.suppress(OSError):  # its other end has closed it
            connection.shutdown(socket.SHUT_RDWR)
            n_cut += 1
    return n_cut


def connections(pid: int) -> Iterator[socket.socket]:
    """Copies of the connected stream sockets of a process, without pairs that it shares with its own children."""
    with contextlib.suppress(ProcessLookupError, FileNotFoundError):
        handle = os.pidfd_open(pid)
        try:
            for number in os.listdir(f"/proc/{pid}/fd"):
                copy = copied_socket(handle, pid, number)
                if copy is not None and is_connection(copy):
                    yield copy
                elif copy is not None:
                    copy.close()
        finally:
            os.close(handle)


def copied_socket(handle: int, pid: int, number: str) -> socket.socket | None:
    """None for a descriptor that is no socket, or is closed. Raises PermissionError."""
    with contextlib.suppress(FileNotFoundError):
        if os.readlink(f"/proc/{pid}/fd/{number}").startswith("socket:"):
            libc = ctypes.CDLL(None, use_errno=True)
            copy = libc.syscall(PIDFD_GETFD, handle, int(number), 0)
            if copy >= 0:
                return socket.socket(fileno=copy)
            if ctypes.get_errno() == errno.EPERM:
                raise PermissionError(errno.EPERM, "pidfd_getfd")
    return None


def is_connection(one: socket.socket) -> bool:
    if one.type != socket.SOCK_STREAM or one.family not in (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX):
        return False
    try:
        ends = one.getpeername(), one.getsockname()
    except OSError:  # it listens, or its other end has closed it
        return False
    return one.family != socket.AF_UNIX or any(isinstance(end, str) and end for end in ends)
