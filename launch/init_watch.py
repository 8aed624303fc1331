"""Bounds MPI_Init, which holds the interpreter's lock: a small process of its own watches it, since no thread can."""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator

from areal_bus.parent_death import die_with_parent


@contextlib.contextmanager
def bounded(rank: int, timeout_s: float) -> Iterator[None]:
    """The block ends within `timeout_s`, or this process is killed, and a line says which rank that was.

    It forks: to be entered before MPI_Init, and before this process has threads or sockets of its own.
    """
    read, write = os.pipe()
    ours = os.getpid()
    watcher = os.fork()
    if not watcher:
        os.close(write)
        _watch(read, ours, rank, timeout_s)
    os.close(read)
    try:
        yield
    finally:
        os.close(write)
        os.waitpid(watcher, 0)


def _watch(read: int, watched: int, rank: int, timeout_s: float) -> None:
    """In the watcher: until the pipe is closed, the watched process ends, or the time is over. Does not return."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # it is for the rank
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(watched)
        if not select.select([read], [], [], timeout_s)[0]:
            os.write(2, f"rank {rank}: {sentence(timeout_s, watched)}\n".encode())
            os.kill(watched, signal.SIGKILL)
    finally:
        os._exit(0)


def sentence(timeout_s: float, process: int) -> str:
    return (
        f"MPI_Init must return within launch.timeout_s = {timeout_s:g}: that of process {process} on "
        f"{socket.gethostname()} has not; it waits for a rank that did not start, or for an mpirun that is gone. Start "
        "the job anew, with a larger launch.timeout_s if ranks need longer to start"
    )
