"""Receives a learner's messages on a thread: pushes go to the push thread, others to the loop, Stop acts at once."""

import queue
import threading
import time
from collections.abc import Callable

from actors.runtime import process as codes
from areal_bus.errors import Restart
from areal_bus.messages import (
    HeadHeartbeat,
    Message,
    NoBatch,
    PeerList,
    PushBegin,
    PushBroken,
    Reassign,
    Rejoin,
    ShardEnd,
    ShardItem,
    Stop,
)
from areal_bus.transport.bus import Bus

LOOK_S = 1.0  # interval of `look` during a wait
REJOIN_GRACE_S = 2.0  # the loop must handle a Rejoin within this time ...
STOP_GRACE_S = 60.0  # ... or a Stop: it may write a checkpoint just then


class StopRun(Exception):
    """The head sent Stop: end cleanly, now."""


class LearnerInbox:
    """Messages for the training loop. `push_begun` and `push_broken` run on the reader thread."""

    def __init__(
        self,
        bus: Bus,
        *,
        push_begun: Callable[[PushBegin], None],
        push_broken: Callable[[PushBroken], None] = lambda _: None,
        overdue: Callable[[int], None],
        rejoin_grace_s: float = REJOIN_GRACE_S,
    ) -> None:
        """`overdue(code)` ends the process if the loop has not done so within the grace time after an order."""
        self.term = 0  # the latest term from the head; after the first push the term of the pushes
        self.life: int | None = None  # incarnation of the joined head, from its PeerList
        self._bus = bus
        self._push_begun = push_begun
        self._push_broken = push_broken
        self._overdue = overdue
        self._rejoin_grace_s = rejoin_grace_s
        self._letters: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop: Stop | None = None
        self._rejoin: Rejoin | None = None
        self._reassign: Reassign | None = None
        self._join: Callable[[int], None] | None = None  # set if the learner can continue with a restarted head
        self._is_bound = False
        self._has_pushed = False
        self._is_ending = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="inbox", daemon=True)
        self._thread.start()

    def take(self, *, look: Callable[[], None] = lambda: None) -> Message:
        """The loop's next message (a share's item: up to 1 s late); `look` runs every second. Raises as `check`."""
        while True:
            self.check()
            message = self.take_now()
            if message is not None:
                return message
            look()
            self.wait(LOOK_S)

    def take_now(self) -> Message | None:
        """The next message of the loop, or None."""
        try:
            return self._letters.get_nowait()
        except queue.Empty:
            return None

    def wait(self, timeout_s: float) -> None:
        self._changed.wait(timeout_s)
        self._changed.clear()

    def check(self) -> None:
        """Raises another thread's error, StopRun after Stop, and Restart after a Reassign, or a Rejoin when bound."""
        if self._error is not None:
            raise self._error
        if self._stop is not None:
            raise StopRun(self._stop.reason)
        if self._reassign is not None:
            raise Restart(f"the split of ranks has changed: {self._reassign.reason}")
        if self._rejoin is not None and self._is_bound:
            raise Restart(f"ordered by the head: {self._rejoin.reason}")

    @property
    def undoes(self) -> bool:
        """Whether the head has refused the copy that this learner began from."""
        return self._rejoin is not None and self._rejoin.undo

    def await_order(self, timeout_s: float) -> None:
        """Wait `timeout_s` for an order. Raises as `check` when the head sends Stop or Rejoin."""
        deadline = time.monotonic() + timeout_s
        self.check()
        while (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
            self.check()

    def bind(self) -> None:
        """From now on a Rejoin ends this process, because its state cannot join again."""
        with self._lock:
            self._is_bound = True
            if self._rejoin is not None:
                self._end_soon(codes.RESTART, self._rejoin_grace_s)

    def live_on(self, join: Callable[[int], None]) -> None:
        """From now on this process continues with a restarted head; `join(life)` joins it, on the reader thread."""
        with self._lock:
            self._join = join

    def asked_to_rejoin(self) -> bool:
        """Whether the head sent Rejoin since the last call. For a learner that is not bound."""
        with self._lock:
            asked, self._rejoin = self._rejoin is not None, None
            return asked

    def fail(self, error: BaseException) -> None:
        """Let the loop raise the error of another thread."""
        self._error = error
        self._changed.set()

    def close(self) -> None:
        self._closed.set()
        self._bus.wake()
        self._thread.join()

    def _read(self) -> None:
        try:
            while not self._closed.is_set():
                received = self._bus.receive(LOOK_S)
                if received is not None:
                    self._sort(received[1])
        except Exception as error:  # noqa: BLE001 (the loop raises it)
            self.fail(error)

    def _sort(self, message: Message) -> None:
        match message:
            case PushBegin():
                self.term, self._has_pushed = message.term, True
                self._push_begun(message)
            case PushBroken():
                self._push_broken(message)
                return
            case HeadHeartbeat():
                if not self._has_pushed:  # else a later term belongs to a successor of this process
                    self.term = max(self.term, message.term)
                return
            case Stop():
                self._stop = message
                self._end_soon(codes.DONE, STOP_GRACE_S)
            case Rejoin():
                self._join_or_end(message)
            case Reassign():
                self._reassign = message
                self._end_soon(codes.RESTART, self._rejoin_grace_s)
            case PeerList():
                self.life = message.life
                self._letters.put(message)
            case ShardItem():
                self._letters.put(message)
                return  # the end of the share wakes the loop
            case ShardEnd() | NoBatch():
                self._letters.put(message)
            case _:
                return  # not for a learner
        self._changed.set()

    def _join_or_end(self, message: Rejoin) -> None:
        """Join a restarted head if this learner can continue with it; else let the loop raise Restart."""
        with self._lock:
            join = None if message.anew or message.life == self.life else self._join
            if join is None:
                self._rejoin = message
                if self._is_bound:
                    self._end_soon(codes.RESTART, self._rejoin_grace_s)
        if join is not None:
            join(message.life)

    def _end_soon(self, code: int, grace_s: float) -> None:
        """End the process if the loop has not ended within the grace time."""
        if self._is_ending:
            return
        self._is_ending = True
        timer = threading.Timer(grace_s, self._overdue, [code])
        timer.daemon = True
        timer.start()
