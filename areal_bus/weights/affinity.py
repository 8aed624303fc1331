"""On which core a thread beside the main one computes; knows nothing of what either does."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROCESSOR = 36  # in /proc/PID/task/TID/stat: of the fields behind the name


@contextmanager
def own_core() -> Iterator[None]:
    """Where cores are short, this thread has the one where its process's main thread is now, to the end of the block.

    Else the scheduler may put it beside another process, which never asked for what is done here and then computes for
    less of the time. Elsewhere, and where the system does not say where threads run, nothing changes.
    """
    thread = threading.get_native_id()
    before: set[int] | None = None
    with suppress(OSError):
        if is_crowded():
            allowed = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, {core_of_main_thread()})
            before = allowed
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):  # its cores were taken away meanwhile
                os.sched_setaffinity(thread, before)


def is_crowded() -> bool:
    """Whether the machine's load of the last minute left less than one of its cores free; False where nothing says so.

    Raises OSError where the load cannot be read.
    """
    n_cores = os.cpu_count()
    return hasattr(os, "sched_setaffinity") and n_cores is not None and os.getloadavg()[0] > n_cores - 1


def core_of_main_thread() -> int:
    """On which it runs, or ran last. Raises OSError where the system does not say."""
    main = os.getpid()  # its thread's number, too
    return int(Path(f"/proc/self/task/{main}/stat").read_bytes().rpartition(b")")[2].split()[PROCESSOR])
