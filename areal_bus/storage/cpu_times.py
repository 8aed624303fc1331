"""CPU time of this process, and the time that its loop waited for a core (Linux; elsewhere only its own CPU time).

The second number separates slow work from work that had no core: a loop's time less its waits is the time that it
would take on an idle machine.
"""

import contextlib
import os
import time
from pathlib import Path

SCHEDSTAT = "schedstat"  # nanoseconds on a core, nanoseconds runnable without one, time slices


class CpuTimes:
    """Differences since the last call. Use it on the thread whose waits count."""

    def __init__(self) -> None:
        self._own_s = time.process_time()
        self._waited_s = loop_wait_s()
        self._children = children_cpu_s()

    def since_last(self) -> dict[str, float]:
        """`cpu_s`: CPU seconds of all threads and of direct child processes. `cpu_wait_s`: seconds that this thread
        was runnable and had no core; left out where the system does not count them.
        """
        own_s, children, waited_s = time.process_time(), children_cpu_s(), loop_wait_s()
        of_children_s = sum(max(0.0, cpu_s - self._children.get(pid, 0.0)) for pid, cpu_s in children.items())
        found = {"cpu_s": round(own_s - self._own_s + of_children_s, 6)}
        if waited_s is not None:
            found["cpu_wait_s"] = round(waited_s - (self._waited_s or 0.0), 6)
        self._own_s, self._children, self._waited_s = own_s, children, waited_s
        return found


def loop_wait_s() -> float | None:
    """Seconds that this thread has been runnable without a core."""
    try:
        return int(Path("/proc/thread-self", SCHEDSTAT).read_text(encoding="ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return None


def children_cpu_s() -> dict[str, float]:
    """Process id of each child -> CPU seconds of its main thread. A child that ends in between is left out."""
    found = {}
    with contextlib.suppress(OSError):
        for thread in os.listdir("/proc/self/task"):
            with contextlib.suppress(OSError):
                for pid in Path("/proc/self/task", thread, "children").read_text(encoding="ascii").split():
                    with contextlib.suppress(OSError, ValueError, IndexError):
                        found[pid] = int(Path("/proc", pid, SCHEDSTAT).read_text(encoding="ascii").split()[0]) / 1e9
    return found
