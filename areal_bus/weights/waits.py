"""Waits of one side of a push, ended by events: a value in the store, an operation of gloo, a cancellation."""

import os
import select
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from areal_bus.errors import PushFailed

OVER_S = 1.0  # an operation of gloo may outlast its push by this
WATCH_OVER_S = 15.0  # so may a request for a value that the other side sets at the end of each push
STOP = "stop:"  # prefix of a value that ends the push; the reason follows


class Wakeup:
    """Ends a wait of one thread. Any thread may set it, also a thread of gloo."""

    def __init__(self) -> None:
        self._descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._descriptor).atexit = False

    def set(self) -> None:
        os.eventfd_write(self._descriptor, 1)

    def wait(self, timeout_s: float, also: Iterable[int] = ()) -> None:
        """Return when it is set, or one of the descriptors is readable, or the time is over; it is then unset."""
        poll = select.poll()
        for descriptor in (self._descriptor, *also):
            poll.register(descriptor, select.POLLIN)
        poll.poll(1000 * timeout_s)
        with suppress(BlockingIOError):
            os.eventfd_read(self._descriptor)


class StoreConnections:
    """Connections to one store for watches. A watch of a push that was left early keeps its own until the root ends."""

    def __init__(self, store: TCPStore) -> None:
        self._store = store
        self._idle: list[TCPStore] = []

    def take(self) -> TCPStore:
        """Raises RuntimeError when the store is gone."""
        try:
            return self._idle.pop()
        except IndexError:
            return self._store.clone()  # type: ignore[attr-defined, no-any-return]  # not in torch's stubs

    def give_back(self, connection: TCPStore) -> None:
        self._idle.append(connection)


class StoreWatch:
    """Values under some keys, which the other side sets in this order. Each one wakes this side."""

    def __init__(self, connections: StoreConnections, keys: Sequence[str], wake: Wakeup, *, timeout_s: float) -> None:
        """Raises RuntimeError when the store is gone."""
        self._connections = connections
        self._keys = keys
        self._wake = wake
        self._limit = timedelta(seconds=timeout_s + WATCH_OVER_S)
        self._values: dict[str, str] = {}
        self._error: str | None = None
        store = connections.take()
        threading.Thread(target=self._run, args=(store,), name="watches the store", daemon=True).start()

    def value(self, key: str) -> str | None:
        """The value, unless it is still missing or stops the push."""
        value = self._values.get(key)
        return None if value is None or value.startswith(STOP) else value

    def check(self) -> str | None:
        """The reason for which the other side stopped the push, if any. Raises RuntimeError when the store is gone."""
        if self._error is not None:
            raise RuntimeError(self._error)
        return next((reason_of(value) for value in list(self._values.values()) if value.startswith(STOP)), None)

    def _run(self, store: TCPStore) -> None:
        try:
            for key in self._keys:
                store.wait([key], self._limit)
                # a value that is gone again belonged to a completed push
                self._values[key] = store.get(key).decode() if store.check([key]) else ""
                self._wake.set()
            self._connections.give_back(store)
        except RuntimeError as error:
            # the text only: a traceback would keep the memory of the frames that raise it again
            self._error = str(error)
            self._wake.set()


def reason_of(value: str) -> str:
    return value.removeprefix(STOP)


class InFlight(Protocol):
    """Operations of gloo in flight."""

    def check(self) -> None: ...


class PushWaits:
    """Waits of one push on one side. They end by success, deadline, `cancel`, or because the other side stopped it."""

    def __init__(
        self, what: str, watch: StoreWatch, *, timeout_s: float, cancelled: threading.Event, wake: Wakeup
    ) -> None:
        """Code that sets `cancelled` must also set `wake`."""
        self._what = what
        self._watch = watch
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s
        self._cancelled = cancelled
        self._wake = wake

    @property
    def wake(self) -> Wakeup:
        return self._wake

    @property
    def left_s(self) -> float:
        """Seconds to the deadline. Never 0, which means "no limit" to torch."""
        return max(self._deadline - time.monotonic(), 0.05)

    @property
    def limit_s(self) -> float:
        """Time limit of an operation: beyond the deadline, whose error text is clearer."""
        return self.left_s + OVER_S

    def value(self, key: str, waits_for: Callable[[], str]) -> str:
        """Wait for the value of a key that the other side sets. Raises as `until`."""
        self.until(lambda: self._watch.value(key) is not None, waits_for)
        return self._watch.value(key) or ""

    def until(
        self,
        done: Callable[[], bool],
        waits_for: Callable[[], str],
        group: InFlight | None = None,
        also: Callable[[], Iterable[int]] = tuple,
    ) -> None:
        """Wait until `done`, which is asked again after each event and when a descriptor of `also` is readable.

        Raises PushFailed, or RuntimeError when an operation of `group` or the store fails.
        """
        while True:
            finished = done()  # evaluated before the check, which then sees its error
            if group is not None:
                group.check()
            if finished:
                return
            self.check(waits_for)
            self._wake.wait(self.left_s, also())

    def check(self, waits_for: Callable[[], str]) -> None:
        """Raises PushFailed when the push was cancelled here, was stopped by the other side, or is overdue."""
        if self._cancelled.is_set():
            raise PushFailed(f"{self._what} was cancelled here; it waited for {waits_for()}")
        if (reason := self._watch.check()) is not None:
            raise self.aborted(reason)
        if time.monotonic() >= self._deadline:
            late = f"{self._what} is not complete after {self._timeout_s:g} s"
            raise PushFailed(f"timed out: {late}; it waits for {waits_for()}")

    def aborted(self, reason: str) -> PushFailed:
        return PushFailed(f"{self._what} was aborted: {reason}")
