"""What has come in and was not looked at yet: handed over in lists by the bus thread, taken one by one by another.

It is bounded in bytes (I9): while it is full the bus reads no socket. Knows neither sockets nor messages.
"""

import queue
from collections import deque

from areal_bus.intake import Received


class Inbox:
    """Of one Bus. Each of its two counts is written by one thread only."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.n_received = 0  # bytes, by the bus thread: `count` and `put`
        self.n_consumed = 0  # bytes, by the thread that takes: `take` and `consume`
        self._lists: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._taken: deque[Received] = deque()

    @property
    def is_full(self) -> bool:
        return self.n_received - self.n_consumed > self.cap_bytes

    def count(self, n_bytes: int) -> None:
        """They are read, and will be put."""
        self.n_received += n_bytes

    def put(self, several: list[Received]) -> None:
        """In order, with one wake-up for all of them."""
        if several:
            self._lists.put(several)

    def wake(self) -> None:
        """Let a `take` that waits return None at once; callable from any thread."""
        self._lists.put(None)

    def take(self, timeout_s: float | None) -> Received | None:
        """The next one; None after `timeout_s` (0: only what is there; None: wait) or when woken."""
        if not self._taken:
            try:
                several = self._lists.get(block=timeout_s != 0, timeout=timeout_s or None)
            except queue.Empty:
                return None
            if several is None:
                return None
            self._taken.extend(several)
        return self._taken.popleft()

    def consume(self, n_bytes: int) -> bool:
        """They are looked at. Returns whether it was full and is no more."""
        before = self.n_consumed
        self.n_consumed += n_bytes
        received = self.n_received  # read once, and last: the bus counts meanwhile, and stops when it finds it full
        return received - before > self.cap_bytes >= received - self.n_consumed
