"""A rank ends with the process that started it: by the kernel's parent-death signal, from its first instruction on.

MPI_Init and MPI_Finalize run in C and handle no Python signal: when mpirun is killed meanwhile, only the kernel ends
the rank. While the supervisor looks after its actors it notices the end by itself, and ends them in order.
"""

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator, Mapping

PR_SET_PDEATHSIG = 1  # Linux: the signal that a process gets when its parent ends
# starters that start ranks from a thread that lives as long as they do: the kernel counts the end of that thread
RANKS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")

_pid = 0  # of the process that started this rank; 0: `die_with_starter` was not called, or it was no starter of ranks


def die_with_parent(parent: int | None = None) -> int:
    """From now on SIGKILL comes when our parent ends; at once if that is not `parent`. Returns its process id."""
    parent = os.getppid() if parent is None else parent
    _signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel knew: nothing would come
        os.kill(os.getpid(), signal.SIGKILL)
    return parent


def die_with_starter(environ: Mapping[str, str] = os.environ) -> None:
    """To be called first of all in a rank. Does nothing where no starter of ranks has set the environment."""
    global _pid
    if any(name in environ for name in RANKS):
        _pid = die_with_parent()


def pid() -> int:
    """Our starter's process id; by now another process may be our parent."""
    return _pid or os.getppid()


@contextlib.contextmanager
def end_is_noticed() -> Iterator[None]:
    """In this block our starter's end kills nobody: the block itself compares `pid()` with `os.getppid()`."""
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
