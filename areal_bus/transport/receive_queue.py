"""Received messages that wait for the actor. The bus thread adds them in lists; another thread takes them one by one.

Bounded in bytes (I9): while it is full, the bus reads no socket. The queue also reports the time up to which all
arrived messages have been taken. A head that lags behind does not count silence after that time.
"""

import queue
import time
from collections import deque

from areal_bus.transport.receiver import Received

MARK_S = 0.05  # minimum distance of two recorded times


class ReceiveQueue:
    """Receive queue of one Bus. Each of its two counters is written by one thread."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.n_received = 0  # bytes; written by the bus thread in `count`
        self.n_consumed = 0  # bytes; written by the taking thread in `consume`
        self._lists: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._taken: deque[Received] = deque()
        self._n_put = self._n_taken = 0  # messages
        self._marks: deque[tuple[int, float]] = deque()  # (messages put, time up to which they are complete)
        self._marked = self._until = time.monotonic()

    @property
    def is_full(self) -> bool:
        return self.n_received - self.n_consumed > self.cap_bytes

    def count(self, n_bytes: int) -> None:
        """Count bytes that were read and will be put."""
        self.n_received += n_bytes

    def put(self, messages: list[Received]) -> None:
        """Add messages in order, with one wake-up."""
        if messages:
            self._n_put += len(messages)
            self._lists.put(messages)

    def mark_complete(self, now: float) -> None:
        """Record that all messages that arrived before this time have been put. Called by the bus thread."""
        if now - self._marked >= MARK_S:
            self._marked = now
            self._marks.append((self._n_put, now))

    @property
    def until(self) -> float:
        """All messages that arrived before this time have been taken. Read by the taking thread."""
        while self._marks and self._marks[0][0] <= self._n_taken:
            self._until = self._marks.popleft()[1]
        return self._until

    def wake(self) -> None:
        """Make a waiting `take` return None. Callable from any thread."""
        self._lists.put(None)

    def take(self, timeout_s: float | None) -> Received | None:
        """Next message; None after `timeout_s` (0: do not wait; None: wait without limit) or when woken."""
        if not self._taken:
            try:
                messages = self._lists.get(block=timeout_s != 0, timeout=timeout_s or None)
            except queue.Empty:
                return None
            if messages is None:
                return None
            self._taken.extend(messages)
        self._n_taken += 1
        return self._taken.popleft()

    def consume(self, n_bytes: int) -> bool:
        """Count consumed bytes. Returns whether the queue was full before and is not full now."""
        before = self.n_consumed
        self.n_consumed += n_bytes
        received = self.n_received  # read once and last, because the bus thread counts concurrently
        return received - before > self.cap_bytes >= received - self.n_consumed
