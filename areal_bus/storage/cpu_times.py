"""CPU time of this process, and the time that its loop waited for a core (Linux; elsewhere only its own CPU time).

The second number separates slow work from work that had no core: a loop's time less its waits is the time that it
would take on an idle machine.
"""

import contextlib
import os
import time
import weakref

MAX_BYTES = 1 << 16  # of one file
SCHEDSTAT = "schedstat"  # nanoseconds on a core, nanoseconds runnable without one, time slices


class CpuTimes:
    """Differences since the last call. Use it on the thread whose waits count."""

    def __init__(self) -> None:
        self._schedstat = LoopSchedstat()
        self._own_s = time.process_time()
        self._waited_s = self._schedstat.wait_s()
        self._children = children_cpu_s()

    def since_last(self) -> dict[str, float]:
        """`cpu_s`: CPU seconds of all threads and of direct child processes. `cpu_wait_s`: seconds that this thread
        was runnable and had no core; left out where the system does not count them.
        """
        own_s, children, waited_s = time.process_time(), children_cpu_s(), self._schedstat.wait_s()
        of_children_s = sum(max(0.0, cpu_s - self._children.get(pid, 0.0)) for pid, cpu_s in children.items())
        found = {"cpu_s": round(own_s - self._own_s + of_children_s, 6)}
        if waited_s is not None:
            found["cpu_wait_s"] = round(waited_s - (self._waited_s or 0.0), 6)
        self._own_s, self._children, self._waited_s = own_s, children, waited_s
        return found

    def close(self) -> None:
        """Close the open file. `since_last` still counts CPU time."""
        self._schedstat.close()


class LoopSchedstat:
    """The scheduler's counters of the thread that creates it.

    The file stays open, until `close` or with the object: a look costs one system call.
    """

    def __init__(self) -> None:
        self._descriptor: int | None = None
        with contextlib.suppress(OSError):
            self._descriptor = os.open(f"/proc/thread-self/{SCHEDSTAT}", os.O_RDONLY | os.O_CLOEXEC)
            self._closing = weakref.finalize(self, os.close, self._descriptor)
            self._closing.atexit = False

    def wait_s(self) -> float | None:
        """Seconds that the thread has been runnable without a core. None where that is not counted."""
        if self._descriptor is None:
            return None
        try:
            return int(os.pread(self._descriptor, MAX_BYTES, 0).split()[1]) / 1e9
        except (OSError, ValueError, IndexError):
            return None

    def close(self) -> None:
        """`wait_s` is None from here on."""
        if self._descriptor is not None:
            self._descriptor = None
            self._closing()


def children_cpu_s() -> dict[bytes, float]:
    """Process id of each child -> CPU seconds of its main thread. A child that ends in between is left out."""
    found: dict[bytes, float] = {}
    if not has_children():
        return found
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                for pid in read(f"/proc/self/task/{thread}/children").split():
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        found[pid] = int(read(f"/proc/{int(pid)}/{SCHEDSTAT}").split()[0]) / 1e9
    return found


def has_children() -> bool:
    """Whether this process has a child, one that has ended included. Reaps none. False where waitid is missing."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13: no /proc to read either
        return False
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def read(path: str) -> bytes:
    """The content of a small file of the kernel. (`Path.read_text` takes three times as long.) Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, MAX_BYTES)
    finally:
        os.close(descriptor)
