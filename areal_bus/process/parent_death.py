"""Ends a rank when the process that started it ends, with the kernel's parent-death signal.

MPI_Init and MPI_Finalize run in C and handle no Python signals. If mpirun is killed meanwhile, only the kernel can end
the rank. While the supervisor runs its actors, it detects the end itself and stops them in order.

A supervisor that the fork server made (launch/fork/fork_server.py) has no launcher as its parent. It holds one end of a
socket whose other end is the process that the launcher started (launch/fork/attendant.py): the end of the connection is
the end of its starter, and the kernel sends the signal for that. The launcher is the parent of that process.
"""

import contextlib
import ctypes
import fcntl
import os
import signal
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

PR_SET_PDEATHSIG = 1  # Linux: signal to a process when its parent ends
# launchers that start ranks from a thread that lives as long as they do: the kernel reacts to the end of that thread
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_pid = 0  # process id of the launcher; 0 before `die_with_starter`, or without a launcher
_starter: socket.socket | None = None  # connection to the process that the launcher started, if that is another one
_starter_pid = 0  # its process id


def die_with_parent(parent: int | None = None) -> int:
    """Request SIGKILL when the parent ends; immediate if the parent is not `parent`. Returns the parent's id."""
    parent = os.getppid() if parent is None else parent
    _signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request: no signal would come
        os.kill(os.getpid(), signal.SIGKILL)
    return parent


def die_with_starter(environ: Mapping[str, str] = os.environ) -> None:
    """Call this first in a rank. Does nothing if no launcher has set the environment."""
    global _pid
    if any(name in environ for name in RANKS):
        _pid = die_with_parent()


def die_with_connection(starter: socket.socket, starter_pid: int, launcher: int) -> None:
    """Request SIGKILL when the other end of `starter` ends. Nothing is ever sent to this end.

    `starter_pid`: the process at that end. `launcher`: the process id of what started it.
    """
    global _pid, _starter, _starter_pid
    _pid, _starter, _starter_pid = launcher, starter, starter_pid
    fcntl.fcntl(starter, fcntl.F_SETOWN, os.getpid())
    _signal_at_starters_end(signal.SIGKILL)


def pid() -> int:
    """Process id of the launcher. The current parent may be another process."""
    if _starter is not None:
        with contextlib.suppress(OSError):  # it has ended
            return int(Path(f"/proc/{_starter_pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])
    return _pid or os.getppid()


def has_attendant() -> bool:
    """Whether the launcher started another process for this rank."""
    return _starter is not None


def is_gone(launcher: int) -> bool:
    """Whether this rank has lost what started it. `launcher`: the earlier `pid()`."""
    if _starter is None:
        return os.getppid() != launcher
    return _has_hung_up(_starter) or pid() != launcher


def _has_hung_up(starter: socket.socket) -> bool:
    """Whether the process at the other end has ended."""
    try:
        return not starter.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True


@contextlib.contextmanager
def end_is_noticed() -> Iterator[None]:
    """Suspend the signal in this block. The block itself asks `is_gone`."""
    is_asked_for = bool(_pid) or has_attendant()
    if is_asked_for:
        _signal_at_starters_end(0)
    try:
        yield
    finally:
        if is_asked_for:
            _signal_at_starters_end(signal.SIGKILL)


def _signal_at_starters_end(number: int) -> None:
    """Request this signal (0: none) for the starter's end, and send SIGKILL if it has ended already."""
    if _starter is None:
        _signal_at_parents_end(number)
        has_ended = os.getppid() != _pid
    else:
        flags = fcntl.fcntl(_starter, fcntl.F_GETFL)
        fcntl.fcntl(_starter, fcntl.F_SETSIG, number)
        fcntl.fcntl(_starter, fcntl.F_SETFL, flags | os.O_ASYNC if number else flags & ~os.O_ASYNC)
        has_ended = _has_hung_up(_starter)
    if number and has_ended:
        os.kill(os.getpid(), signal.SIGKILL)


def _signal_at_parents_end(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
