"""On which core a thread beside the main one computes; knows nothing of what either does."""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PROCESSOR = 36  # in /proc/PID/task/TID/stat: of the fields behind the name


@contextmanager
def own_core() -> Iterator[None]:
    """Where no core is free, this thread shares that of its process's main thread until the end of the block.

    Else the scheduler may put it beside another process, which never asked for what is done here and then computes for
    less of the time. Where a core is free, or the system does not say where threads run, nothing changes.
    """
    before: set[int] | None = None
    if is_crowded():
        with suppress(OSError):
            allowed = os.sched_getaffinity(threading.get_native_id())
            os.sched_setaffinity(threading.get_native_id(), {core_of_main_thread()})
            before = allowed
    try:
        yield
    finally:
        if before is not None:
            with suppress(OSError):  # its cores were taken away meanwhile
                os.sched_setaffinity(threading.get_native_id(), before)


def is_crowded() -> bool:
    """Whether, over the last minute, others would have had none of this process's cores for themselves."""
    return hasattr(os, "sched_getaffinity") and os.getloadavg()[0] > len(os.sched_getaffinity(0)) - 1


def core_of_main_thread() -> int:
    """On which it runs, or ran last. Raises OSError where the system does not say."""
    main = os.getpid()  # its thread's number, too
    return int(Path(f"/proc/self/task/{main}/stat").read_text().rpartition(")")[2].split()[PROCESSOR])
