"""Threads that take a part of a layer's work while their cores have nothing else to do; see worker_threads.c.

There is one crew a process. What it changes of results is the order in which a weight's slopes are summed, which is not
the same each time.
"""

import ctypes
import threading
import time
from dataclasses import dataclass

from actors.cpu import build

MOST = 15  # helpers, as in worker_threads.h
START_S = 30.0  # until a thread is known to have begun, on a machine with other work, too
LOOK_S = 0.0005

_POINTER = ctypes.c_void_p


@dataclass(frozen=True, slots=True)
class Helped:
    """What there is of helpers, and what they did so far."""

    n_helpers: int
    n_units: int  # rows, and parts of attention, that were computed while there were some
    n_theirs: int  # that helpers had of these

    @staticmethod
    def now() -> "Helped":
        counts = (ctypes.c_int64 * 3)()
        build.function("helped", _POINTER)(counts)
        return Helped(*counts)


class Crew:
    """The helpers of this process, until `close`."""

    def __init__(self, n: int) -> None:
        """Raises RuntimeError, with none left: no library, the system lets no thread be one, there are some already."""
        if not 1 <= n <= MOST:
            raise ValueError(f"a crew has 1 to {MOST} helpers: {n}")
        if Helped.now().n_helpers:
            raise RuntimeError("there is one crew a process")
        self._threads: list[threading.Thread] = []
        try:
            for _ in range(n):
                self._add()
        except RuntimeError:
            self.close()
            raise

    def _add(self) -> None:
        found = ctypes.c_int64(1)
        thread = threading.Thread(target=lambda: build.function("helper", _POINTER)(ctypes.byref(found)), daemon=True)
        thread.start()
        self._threads.append(thread)
        deadline = time.monotonic() + START_S
        while thread.is_alive() and Helped.now().n_helpers < len(self._threads) and time.monotonic() < deadline:
            time.sleep(LOOK_S)
        if Helped.now().n_helpers < len(self._threads):
            raise RuntimeError("the system gives no thread the scheduler's idle policy (SCHED_IDLE)")

    def close(self) -> None:
        """No work is under way, and they end. Once more does nothing."""
        if not self._threads:
            return
        build.function("helpers_end")()
        for thread in self._threads:
            thread.join()
        self._threads.clear()
        build.function("helpers_gone")()
