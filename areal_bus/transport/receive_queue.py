"""What has come in and was not looked at yet: handed over in lists by the bus thread, taken one by one by another.

It is bounded in bytes (I9): while it is full the bus reads no socket. Knows neither sockets nor messages. It reports
the moment up to which all that came in has been taken: a head that is late judges no silence after that.
"""

import queue
import time
from collections import deque

from areal_bus.transport.receiver import Received

MARK_S = 0.05  # least time between two moments that are remembered


class ReceiveQueue:
    """Of one Bus. Each of its two counts is written by one thread only."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.n_received = 0  # bytes, by the bus thread: `count` and `put`
        self.n_consumed = 0  # bytes, by the thread that takes: `take` and `consume`
        self._lists: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._taken: deque[Received] = deque()
        self._n_put = self._n_taken = 0  # messages
        self._marks: deque[tuple[int, float]] = deque()  # messages put, and the moment before which no further one came
        self._marked = self._until = time.monotonic()

    @property
    def is_full(self) -> bool:
        return self.n_received - self.n_consumed > self.cap_bytes

    def count(self, n_bytes: int) -> None:
        """They are read, and will be put."""
        self.n_received += n_bytes

    def put(self, several: list[Received]) -> None:
        """In order, with one wake-up for all of them."""
        if several:
            self._n_put += len(several)
            self._lists.put(several)

    def is_whole(self, moment: float) -> None:
        """All that came in before this moment has been put. By the bus thread."""
        if moment - self._marked >= MARK_S:
            self._marked = moment
            self._marks.append((self._n_put, moment))

    @property
    def until(self) -> float:
        """All that came in before this moment has been taken. By the thread that takes."""
        while self._marks and self._marks[0][0] <= self._n_taken:
            self._until = self._marks.popleft()[1]
        return self._until

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
        self._n_taken += 1
        return self._taken.popleft()

    def consume(self, n_bytes: int) -> bool:
        """They are looked at. Returns whether it was full and is no more."""
        before = self.n_consumed
        self.n_consumed += n_bytes
        received = self.n_received  # read once, and last: the bus counts meanwhile, and stops when it finds it full
        return received - before > self.cap_bytes >= received - self.n_consumed
