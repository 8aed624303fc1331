"""What reaches a learner, sorted as it comes: pushes to their thread, the rest to the loop; knows no tensors.

One thread reads the bus, so that a push begins while the loop computes, and so that an order to end is obeyed even
while the loop is stuck in a collective whose other side is gone.
"""

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
    Rejoin,
    ShardEnd,
    ShardItem,
    Stop,
)
from areal_bus.transport.bus import Bus

LOOK_S = 1.0  # how often a wait looks around
REJOIN_GRACE_S = 2.0  # the loop has so long to notice a Rejoin ...
STOP_GRACE_S = 60.0  # ... or a Stop: it may write a checkpoint just then


class StopRun(Exception):
    """The head said Stop: end cleanly, now."""


class LearnerInbox:
    """Messages for the learner's loop; `push_begun` and `push_broken` are called on the reading thread."""

    def __init__(
        self,
        bus: Bus,
        *,
        push_begun: Callable[[PushBegin], None],
        push_broken: Callable[[PushBroken], None] = lambda _: None,
        overdue: Callable[[int], None],
        rejoin_grace_s: float = REJOIN_GRACE_S,
    ) -> None:
        """`overdue(code)` ends the process: called when the loop has not ended it a grace time after an order to."""
        self.term = 0  # as far as the head has said; once pushes have come: theirs, whatever term follows
        self.life: int | None = None  # of the head that was joined, by its Directory
        self._bus = bus
        self._push_begun = push_begun
        self._push_broken = push_broken
        self._overdue = overdue
        self._rejoin_grace_s = rejoin_grace_s
        self._letters: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop: Stop | None = None
        self._rejoin: Rejoin | None = None
        self._join: Callable[[int], None] | None = None  # for a learner that outlives its head
        self._is_bound = False
        self._has_pushed = False
        self._is_ending = False
        self._error: BaseException | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="letterbox", daemon=True)
        self._thread.start()

    def take(self, *, look: Callable[[], None] = lambda: None) -> Message:
        """The next message of the loop; waits, calling `look` every second. Raises as `check` does.

        An item of a share may be taken as late as the next other message, or a second after it came.
        """
        while True:
            self.check()
            message = self.take_now()
            if message is not None:
                return message
            look()
            self.wait(LOOK_S)

    def take_now(self) -> Message | None:
        """The next message of the loop, if one is there."""
        try:
            return self._letters.get_nowait()
        except queue.Empty:
            return None

    def wait(self, timeout_s: float) -> None:
        """Return when something has come, `timeout_s` later at most."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def check(self) -> None:
        """Raises what another thread of the learner failed with, StopRun once the head said Stop, and Restart once it
        said Rejoin to a learner that is bound.
        """
        if self._error is not None:
            raise self._error
        if self._stop is not None:
            raise StopRun(self._stop.reason)
        if self._rejoin is not None and self._is_bound:
            raise Restart(f"a learner of which the head knows nothing begins anew: {self._rejoin.reason}")

    def await_order(self, timeout_s: float) -> None:
        """Return after `timeout_s` unless the head says Stop or Rejoin before: then raises as `check`."""
        deadline = time.monotonic() + timeout_s
        self.check()
        while (left_s := deadline - time.monotonic()) > 0:
            self.wait(left_s)
            self.check()

    def bind(self) -> None:
        """From now on this life is bound to what it holds: it cannot join anew, and a Rejoin ends it."""
        with self._lock:
            self._is_bound = True
            if self._rejoin is not None:
                self._end_soon(codes.RESTART, self._rejoin_grace_s)

    def live_on(self, join: Callable[[int], None]) -> None:
        """From now on this life outlives its head: `join(life)`, on the reading thread, joins the next one."""
        with self._lock:
            self._join = join

    def asked_to_rejoin(self) -> bool:
        """Whether the head has said Rejoin since the last call. For a learner that is not bound."""
        with self._lock:
            asked, self._rejoin = self._rejoin is not None, None
            return asked

    def fail(self, error: BaseException) -> None:
        """Another thread cannot go on: the loop raises its error."""
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
        except Exception as error:  # noqa: BLE001 (handed to the loop, which raises it)
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
                if not self._has_pushed:  # else a later term is that of whoever has taken our place
                    self.term = max(self.term, message.term)
                return
            case Stop():
                self._stop = message
                self._end_soon(codes.DONE, STOP_GRACE_S)
            case Rejoin():
                self._join_or_end(message)
            case PeerList():
                self.life = message.life
                self._letters.put(message)
            case ShardItem():
                self._letters.put(message)
                return  # the loop is woken by the end of the share: nothing is done with a part of one
            case ShardEnd() | NoBatch():
                self._letters.put(message)
            case _:
                return  # what is not for a learner
        self._changed.set()

    def _join_or_end(self, message: Rejoin) -> None:
        """A head of another life is joined by whoever can outlive one; the same head has lost what nobody repeats."""
        with self._lock:
            join = None if message.anew or message.life == self.life else self._join
            if join is None:
                self._rejoin = message
                if self._is_bound:
                    self._end_soon(codes.RESTART, self._rejoin_grace_s)
        if join is not None:
            join(message.life)

    def _end_soon(self, code: int, grace_s: float) -> None:
        """The loop ends by itself within the grace time, or the process is ended."""
        if self._is_ending:
            return
        self._is_ending = True
        timer = threading.Timer(grace_s, self._overdue, [code])
        timer.daemon = True
        timer.start()
