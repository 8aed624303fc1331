"""Puts a timeout on MPI_Init. A forked process enforces it: MPI_Init holds the GIL, so a thread cannot."""

import contextlib
import os
import select
import signal
import socket
from collections.abc import Iterator

from areal_bus.process.parent_death import die_with_parent


@contextlib.contextmanager
def bounded(rank: int, timeout_s: float) -> Iterator[None]:
    """Kill this process, with a line that names the rank, unless the block ends within `timeout_s`.

    It forks: enter it before MPI_Init, and before this process has threads or sockets.
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
    """Body of the watcher process. Ends when the pipe closes or the watched process ends; kills it on timeout."""
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the rank handles it
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(watched)
        if not select.select([read], [], [], timeout_s)[0]:
            os.write(2, f"rank {rank}: {sentence(timeout_s, watched)}\n".encode())
            os.kill(watched, signal.SIGKILL)
    finally:
        os._exit(0)


def sentence(timeout_s: float, process: int) -> str:
    return (
        f"MPI_Init must return within launch.timeout_s = {timeout_s:g}: process {process} on {socket.gethostname()} is "
        "still in it; a rank did not start, or mpirun is gone. Start the job again, with a larger launch.timeout_s if "
        "ranks need longer to start"
    )
