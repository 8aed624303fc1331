"""New weights arrive in a side thread while the engine decodes; knows no engine and no message but PushBegin."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.receiver import WeightReceiver

END_AGAIN_S = 0.05
STUCK_S = 5.0  # whoever has not ended so long after it was told to is in a call that knows no deadline

Forms = Mapping[str, tuple[Sequence[int], str]]
Outcomes = queue.SimpleQueue["ReceivedWeights | BrokenPush | Exception"]


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Verified weights, to be swapped in."""

    begin: PushBegin
    tensors: dict[str, Any]
    digest: str
    receive_s: float


@dataclass(frozen=True, slots=True)
class BrokenPush:
    """A push that did not complete here."""

    begin: PushBegin
    error: str


class WeightUpdates:
    """One push at a time: a newer one ends the one under way. `wake` is called from the thread when there is news."""

    def __init__(self, make_member: Callable[[], WeightReceiver], expect: Forms, wake: Callable[[], None]) -> None:
        self._make_member, self._expect, self._wake = make_member, expect, wake
        self._member = make_member()
        self._outcomes: Outcomes = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._next: PushBegin | None = None
        self._told: float | None = None  # when the push under way was told to end
        self._unwanted = False  # what comes of it is nobody's
        self.spare: Mapping[str, Any] | None = None  # tensors to receive into

    def begin(self, begin: PushBegin) -> None:
        """Take part in this push, as soon as the one before has ended."""
        self._next = begin
        if self._thread is None:
            self._start()
        else:
            self._end()

    def drop(self) -> None:
        """Whoever announced the push under way is gone: it ends, and nobody hears what came of it."""
        self._next = None
        if self._thread is not None:
            self._unwanted = True
            self._end()

    def take(self) -> ReceivedWeights | BrokenPush | None:
        """What came of a push since the last call, if anything. Raises what ended the thread otherwise."""
        try:
            outcome = self._outcomes.get_nowait()
        except queue.Empty:
            if self._told is not None:
                self._end()
            return None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(outcome, Exception):
            raise outcome
        unwanted = self._unwanted
        if unwanted and isinstance(outcome, ReceivedWeights):
            self.spare = outcome.tensors
        if self._next is not None:
            self._start()
        return None if unwanted else outcome

    def close(self) -> None:
        """End what is under way."""
        self._next = None
        while self._thread is not None and self._thread.is_alive():
            thread = self._thread
            self._end()
            thread.join(END_AGAIN_S)
        self._member.close()

    def _end(self) -> None:
        """Said once more at each `take`, for a thread that has only just begun may not hear it."""
        self._told = self._told or time.monotonic()
        self._member.cancel()
        if time.monotonic() - self._told > STUCK_S:
            self._abandon()

    def _abandon(self) -> None:
        """Torch waits for ever for a store whose process stands still: that thread keeps what it has, and may end when
        it likes; another one takes its place.
        """
        self._member, self._outcomes = self._make_member(), queue.SimpleQueue()
        self._thread, self._told = None, None
        if self._next is not None:
            self._start()

    def _start(self) -> None:
        self._told, self._unwanted = None, False
        begin, self._next = self._next, None
        into, self.spare = self.spare, None  # the thread's alone from here on
        arguments = (self._member, self._outcomes, begin, into)
        self._thread = threading.Thread(target=self._receive, args=arguments, name="weights", daemon=True)
        self._thread.start()

    def _receive(
        self, member: WeightReceiver, outcomes: Outcomes, begin: PushBegin, into: Mapping[str, Any] | None
    ) -> None:
        try:
            tensors, digest, receive_s = member.receive(begin, into, expect=self._expect)
            outcomes.put(ReceivedWeights(begin, tensors, digest, receive_s))
        except PushFailed as error:
            outcomes.put(BrokenPush(begin, str(error)))
        except Exception as error:  # noqa: BLE001  raised again in `take`, on the actor's own thread
            outcomes.put(error)
        finally:
            self._wake()
