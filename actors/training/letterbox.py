"""What reaches a learner, sorted as it comes: pushes to their thread, the rest to the loop; knows no tensors.

One thread reads the bus, so that a push begins while the loop computes.
"""

import queue
import threading
from collections.abc import Callable

from areal_bus.bus import Bus
from areal_bus.messages import Directory, Message, NoBatch, PushBegin, ShardEnd, ShardItem, Stop

LOOK_S = 1.0  # how often a wait looks around


class StopRun(Exception):
    """The head said Stop: end cleanly, now."""


class Letterbox:
    """Messages for the learner's loop; `push_begun` is called on the reading thread for every PushBegin."""

    def __init__(self, bus: Bus, *, push_begun: Callable[[PushBegin], None]) -> None:
        self._bus = bus
        self._push_begun = push_begun
        self._letters: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stop: Stop | None = None
        self._error: BaseException | None = None
        self._closed = threading.Event()
        self._changed = threading.Event()
        self._thread = threading.Thread(target=self._read, name="letterbox", daemon=True)
        self._thread.start()

    def take(self, *, look: Callable[[], None] = lambda: None) -> Message:
        """The next message of the loop; waits, calling `look` every second.

        Raises StopRun once the head said Stop, and what another thread of the learner failed with.
        """
        while True:
            self.check()
            try:
                return self._letters.get_nowait()
            except queue.Empty:
                look()
                self._changed.wait(LOOK_S)
                self._changed.clear()

    def check(self) -> None:
        """Raises StopRun once the head said Stop, and what another thread of the learner failed with."""
        if self._error is not None:
            raise self._error
        if self._stop is not None:
            raise StopRun(self._stop.reason)

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
                self._push_begun(message)
            case Stop():
                self._stop = message
            case ShardItem() | ShardEnd() | NoBatch() | Directory():
                self._letters.put(message)
            case _:
                return  # HeadBeat and what is not for a learner
        self._changed.set()
