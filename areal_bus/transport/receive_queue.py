"""Received messages that wait for the actor: one queue for each sender, which are taken from in turn.

The bus thread adds messages in lists; another thread takes them one by one. Bounded in bytes (I9): while it is full,
the bus reads no socket, unless one sender (a hog) has filled it: then it reads on and drops what the hog sends. The
queue reports the time up to which every sender was heard. A head that lags behind counts no silence after that time.
"""

import queue
import time
from collections import deque
from collections.abc import Callable

from areal_bus.transport.receiver import Received

MARK_S = 0.05  # minimum distance of two recorded times
MAX_SENDERS = 1 << 14  # whose bytes are counted, unless more have messages here


class ReceiveQueue:
    """Receive queue of one Bus. Each of its counters is written by one thread."""

    def __init__(self, cap_bytes: int) -> None:
        self.cap_bytes = cap_bytes
        self.n_received = 0  # bytes; written by the bus thread in `count`
        self.n_consumed = 0  # bytes; written by the taking thread in `take`
        self._lists: queue.SimpleQueue[list[Received] | None] = queue.SimpleQueue()
        self._waiting: dict[str, deque[Received]] = {}  # by sender; no empty queues
        self._turns: deque[str | float] = deque()  # senders in `_waiting`, in turn; marks, which pass with the round
        self._received: dict[str, int] = {}  # bytes by sender; written by the bus thread
        self._consumed: dict[str, int] = {}  # bytes by sender; written by the taking thread
        self._n_put = self._n_fetched = 0  # messages
        self._marks: deque[tuple[int, float]] = deque()  # (messages put, time up to which they are complete)
        self._marked = self._until = time.monotonic()
        self._is_woken = False  # since the last `take` that found nothing

    @property
    def is_full(self) -> bool:
        return self.n_received - self.n_consumed > self.cap_bytes

    @property
    def has_hog(self) -> bool:
        """Whether it is full of one sender's messages, so that others are read and those of this one are dropped.

        Others may fill it once more. Called by the bus thread.
        """
        is_over = self.n_received - self.n_consumed > 2 * self.cap_bytes
        return self.is_full and not is_over and any(map(self.is_hog, self._received))

    def is_hog(self, sender: str) -> bool:
        """Whether it is full, and more than half of that is of this sender. Called by the bus thread."""
        waiting = self._received.get(sender, 0) - self._consumed.get(sender, 0)
        return self.is_full and 2 * waiting > self.cap_bytes

    def count(self, received: list[Received]) -> None:
        """Count messages that were read and will be put."""
        for sender, _, n_bytes in received:
            self.n_received += n_bytes
            self._received[sender] = self._received.get(sender, 0) + n_bytes
        if len(self._received) > MAX_SENDERS:
            for sender in [name for name, n in self._received.items() if n == self._consumed.get(name, 0)]:
                del self._received[sender]
                self._consumed.pop(sender, None)

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
        """Of each sender all messages from before this time were taken, or one since. Read by the taking thread."""
        self._fetch()
        while self._turns and isinstance(self._turns[0], float):
            self._until = self._turns.popleft()  # type: ignore[assignment]
        return self._until

    def wake(self) -> None:
        """Make a waiting `take` return None. Callable from any thread."""
        self._lists.put(None)

    def take(self, timeout_s: float | None, *, skips: Callable[[str], bool] | None = None) -> Received | None:
        """Next message of the next sender in turn; None after `timeout_s` (0: do not wait; None: wait without limit) or
        when woken. `skips`: whether the messages of a sender stay here.
        """
        self._fetch()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (received := self._next(skips)) is None and not self._is_woken:
            rest_s = None if deadline is None else deadline - time.monotonic()
            if timeout_s == 0 or (rest_s is not None and rest_s <= 0):
                return None
            try:
                self._add(self._lists.get(timeout=rest_s))
            except queue.Empty:
                return None
            self._fetch()
        if received is None:
            self._is_woken = False
        return received

    def consume(self, received: Received) -> bool:
        """Count a taken message. Returns whether the queue was full before and is not full now."""
        sender, _, n_bytes = received
        before = self.n_consumed
        self.n_consumed += n_bytes
        self._consumed[sender] = self._consumed.get(sender, 0) + n_bytes
        n_received = self.n_received  # read once and last, because the bus thread counts concurrently
        return n_received - before > self.cap_bytes >= n_received - self.n_consumed

    def _fetch(self) -> None:
        """Move what was put to the queues of the senders, and place the marks behind it."""
        while not self._lists.empty():
            self._add(self._lists.get())
        while self._marks and self._marks[0][0] <= self._n_fetched:
            self._turns.append(self._marks.popleft()[1])

    def _add(self, messages: list[Received] | None) -> None:
        if messages is None:
            self._is_woken = True
            return
        self._n_fetched += len(messages)
        for received in messages:
            waiting = self._waiting.get(received[0])
            if waiting is None:
                self._waiting[received[0]] = waiting = deque()
                self._turns.append(received[0])
            waiting.append(received)

    def _next(self, skips: Callable[[str], bool] | None) -> Received | None:
        for _ in range(len(self._turns)):
            turn = self._turns.popleft()
            if isinstance(turn, float):
                self._until = turn
            elif skips is not None and skips(turn):
                self._turns.append(turn)
            else:
                waiting = self._waiting[turn]
                received = waiting.popleft()
                if waiting:
                    self._turns.append(turn)
                else:
                    del self._waiting[turn]
                return received
        return None
