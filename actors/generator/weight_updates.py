"""Receives new weights on a thread while the engine decodes."""

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.delta import BaseWeights
from areal_bus.weights.receiver import WeightReceiver

JOIN_S = 0.05  # interval between cancellations at close

Forms = Mapping[str, tuple[Sequence[int], str]]
Outcomes = queue.SimpleQueue["ReceivedWeights | BrokenPush | Exception"]


@dataclass(frozen=True, slots=True)
class ReceivedWeights:
    """Verified weights, ready for the swap."""

    begin: PushBegin
    tensors: dict[str, Any]
    digest: str
    receive_s: float
    sent_bytes: int = 0  # 0: copied from shared memory
    delta_from: int | None = None  # version that a delta was applied to


@dataclass(frozen=True, slots=True)
class BrokenPush:
    """A push that failed on this generator."""

    begin: PushBegin
    error: str


class WeightUpdates:
    """Takes part in one push at a time; a newer push cancels it. `wake` is called from the thread at each outcome."""

    def __init__(
        self,
        make_member: Callable[[], WeightReceiver],
        expect: Forms,
        wake: Callable[[], None],
        *,
        stuck_s: float = 5.0,
    ) -> None:
        """A thread that still runs `stuck_s` seconds after its cancellation is in a call without a deadline."""
        self._make_member, self._expect, self._wake = make_member, expect, wake
        self._stuck_s = stuck_s
        self._member = make_member()
        self._outcomes: Outcomes = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._next: PushBegin | None = None
        self._cancelled_at: float | None = None  # of the push in progress
        self._is_unwanted = False  # the outcome of the push in progress is discarded
        self.spare: Mapping[str, Any] | None = None  # tensors that receive the next weights
        self._live: BaseWeights | None = None  # what the engine holds: a delta may start from it

    def begin(self, begin: PushBegin) -> None:
        """Take part in this push once the one before has ended."""
        self._next = begin
        if self._thread is None:
            self._start()
        else:
            self._cancel()

    def swapped(self, received: ReceivedWeights, spare: Mapping[str, Any]) -> None:
        """The engine holds these weights now, and has returned the tensors of the next push (maybe the same ones)."""
        self.spare = spare
        self._live = BaseWeights(received.begin.version, received.digest, received.tensors)

    def drop(self) -> None:
        """Cancel the push in progress and discard its outcome: the head that announced it is gone."""
        self._next = None
        if self._thread is not None:
            self._is_unwanted = True
            self._cancel()

    def take(self) -> ReceivedWeights | BrokenPush | None:
        """The outcome of a push since the last call, if any. Raises an unexpected error of the thread."""
        try:
            outcome = self._outcomes.get_nowait()
        except queue.Empty:
            if self._cancelled_at is not None:
                self._cancel()
            return None
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if isinstance(outcome, Exception):
            raise outcome
        unwanted = self._is_unwanted
        if unwanted and isinstance(outcome, ReceivedWeights):
            self.spare = outcome.tensors
        if self._next is not None:
            self._start()
        return None if unwanted else outcome

    def close(self) -> None:
        """Cancel the push in progress and close the receiver."""
        self._next = None
        while self._thread is not None and self._thread.is_alive():
            thread = self._thread
            self._cancel()
            thread.join(JOIN_S)
        self._member.close()

    def _cancel(self) -> None:
        """Cancel the push. Repeated at each `take`: a thread that has just started may miss the first one."""
        self._cancelled_at = self._cancelled_at or time.monotonic()
        self._member.cancel()
        if time.monotonic() - self._cancelled_at > self._stuck_s:
            self._abandon()

    def _abandon(self) -> None:
        """Replace a stuck thread: torch waits for a stopped store for ever. The old one keeps its buffers."""
        self._member, self._outcomes = self._make_member(), queue.SimpleQueue()
        self._thread, self._cancelled_at = None, None
        if self._next is not None:
            self._start()

    def _start(self) -> None:
        self._cancelled_at, self._is_unwanted = None, False
        begin, self._next = self._next, None
        into, self.spare = self.spare, None  # owned by the thread from here on
        live = self._live
        if live is not None and into is not None and overlap(live.tensors, into):
            self._live = None  # it is overwritten, whatever comes of the push
        arguments = (self._member, self._outcomes, begin, into, live)
        self._thread = threading.Thread(target=self._receive, args=arguments, name="weights", daemon=True)
        self._thread.start()

    def _receive(
        self,
        member: WeightReceiver,
        outcomes: Outcomes,
        begin: PushBegin,
        into: Mapping[str, Any] | None,
        live: BaseWeights | None,
    ) -> None:
        try:
            outcomes.put(ReceivedWeights(begin, *member.receive(begin, into, expect=self._expect, base=live)))
        except PushFailed as error:
            outcomes.put(BrokenPush(begin, str(error)))
        except Exception as error:  # noqa: BLE001  raised again in `take`, on the actor's thread
            outcomes.put(error)
        finally:
            self._wake()


def overlap(live: Mapping[str, Any], into: Mapping[str, Any]) -> bool:
    """Whether any two tensors of one name are the same memory. An empty tensor has no address."""
    addresses = ((one.data_ptr(), into[name].data_ptr()) for name, one in live.items() if name in into)
    return any(a == b != 0 for a, b in addresses)
