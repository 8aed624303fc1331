"""Ends a rank when the process that started it ends, with the kernel's parent-death signal.

MPI_Init and MPI_Finalize run in C and handle no Python signals. If mpirun is killed meanwhile, only the kernel can end
the rank. While the supervisor runs its actors, it detects the end itself and stops them in order.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping

PR_SET_PDEATHSIG = 1  # Linux: signal to a process when its parent ends
# launchers that start ranks from a thread that lives as long as they do: the kernel reacts to the end of that thread
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_pid = 0  # process id of the launcher; 0 before `die_with_starter`, or without a launcher


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


def pid() -> int:
    """Process id of the launcher. The current parent may be another process."""
    return _pid or os.getppid()


@contextlib.contextmanager
def end_is_noticed() -> Iterator[None]:
    """Suspend the signal in this block. The block itself compares `pid()` with `os.getppid()`."""
    if _pid:
        _signal_at_parents_end(0)
    try:
        yield
    finally:
        if _pid:
            _signal_at_parents_end(signal.SIGKILL)
            if os.getppid() != _pid:
                os.kill(os.getpid(), signal.SIGKILL)


def _signal_at_parents_end(number: int) -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
