"""Sessions: pass calls from the HTTP server's thread to the generator's loop, one at a time each, and answers back."""

import asyncio
import queue
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from actors.endpoint.openai_api import ChatCall, ChatCompletion, RequestRejected

ENDED = "this conversation has ended"
MOST_ENDED = 1000  # keys of closed sessions that are known


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The end of an agent: its return value or its error."""

    returned: dict[str, Any] | None
    error: str = ""
    place: str = ""  # FILE:LINE of the error in the agent's code
    trace: str = ""  # the traceback
    is_unusable: bool = False  # the agent's code does not load: no conversation can succeed
    was_killed: bool = False  # its process was killed from outside: another process may succeed


class Pending:
    """One call in progress: the loop answers or rejects it once; the HTTP server awaits `result`."""

    def __init__(self, call: ChatCall, number: int, client_is_gone: Callable[[], bool], session: "Session") -> None:
        self.call, self.number = call, number
        self.client_is_gone = client_is_gone  # valid until the answer is delivered
        self.is_delivered = False  # the answer was written to the client
        self._session = session
        self._result: Future[Sequence[ChatCompletion]] = Future()
        self._result.set_running_or_notify_cancel()  # from here on no waiting handler can cancel it

    def answer(self, choices: Sequence[ChatCompletion]) -> None:
        self._session.resume_clock()
        self._result.set_result(choices)

    def reject(self, rejection: RequestRejected) -> None:
        self._session.resume_clock()
        self._result.set_exception(rejection)

    async def result(self) -> Sequence[ChatCompletion]:
        """Wait for the choices. Raises RequestRejected."""
        return await asyncio.wrap_future(self._result)

    @property
    def is_done(self) -> bool:
        return self._result.done()

    @property
    def is_undeliverable(self) -> bool:
        """The client disconnected before it received the answer."""
        return not self.is_delivered and self.client_is_gone()


class WakeOnce:
    """Wakes the loop once, until the loop has reset it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_set = False

    def wake(self) -> None:
        """Call it after an event was queued, from any thread."""
        if not self._is_set:
            self._is_set = True
            self._wake()

    def reset(self) -> None:
        """The loop reads the events now."""
        self._is_set = False


def no_connection(session: "Session") -> None:
    """While no server runs."""


class Session:
    """One conversation. The server adds calls, the agent's thread ends it, the loop reads both and closes it."""

    def __init__(self, key: str, number: int, name: str, waker: WakeOnce, on_end: Callable[["Session"], None]) -> None:
        """`on_end` is called in the agent's thread, before that begins another conversation."""
        self.key, self.number, self.name = key, number, name
        self._waker, self._on_end = waker, on_end
        self._events: queue.SimpleQueue[Pending | AgentEnded] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last: Pending | None = None
        self._n_calls = 0
        self.is_closed = self._has_ended = False
        self._on_close: Callable[[], None] = lambda: None
        self._own_s = 0.0  # the agent's own time until `_runs_since`
        self._runs_since: float | None = None  # None: the agent waits for the model, or has not begun

    # the server's thread

    def call(self, call: ChatCall, client_is_gone: Callable[[], bool], *, is_retry: bool = False) -> Pending:
        """Queue a call to the model; a retry of the last call returns that one. Raises RequestRejected."""
        with self._lock:
            if not self.needs_connections:
                raise RequestRejected(ENDED, status=401, code="invalid_api_key")
            last = self._last
            if last is not None and last.call.body == call.body and (is_retry or last.is_undeliverable):
                last.client_is_gone = client_is_gone
                return last
            if last is not None and not last.is_done:
                raise RequestRejected(
                    "a conversation has one call in progress at a time: the one before is not answered yet"
                )
            self._pause_clock()
            self._n_calls += 1
            self._last = Pending(call, self._n_calls, client_is_gone, self)
            self._events.put(self._last)
        self._waker.wake()
        return self._last

    # the agent's thread

    def begin(self, on_close: Callable[[], None]) -> bool:
        """The agent begins. `on_close` is called once, from any thread. Returns False if the session is closed."""
        with self._lock:
            if not self.is_closed:
                self._on_close, self._runs_since = on_close, time.monotonic()
            return not self.is_closed

    def restart_clock(self) -> None:
        """Reset the agent's own time to 0."""
        with self._lock:
            self._own_s, self._runs_since = 0.0, time.monotonic()

    def end(self, ended: AgentEnded) -> bool:
        """The first end counts. Returns whether this is it."""
        with self._lock:
            is_first, self._has_ended = self.needs_connections, True
        if is_first:
            self._on_end(self)
            self._events.put(ended)
            self._waker.wake()
        return is_first

    @property
    def own_s(self) -> float:
        """The agent's own time. The clock stops while the agent waits for the model."""
        with self._lock:
            return self._own_s + (0.0 if self._runs_since is None else time.monotonic() - self._runs_since)

    @property
    def needs_connections(self) -> bool:
        """Its agent may send another call."""
        return not (self.is_closed or self._has_ended)

    # the loop

    def has_event(self) -> bool:
        self._waker.reset()
        return not self._events.empty()

    def next_event(self) -> Pending | AgentEnded:
        """The oldest event; call it only after `has_event`."""
        return self._events.get_nowait()

    def resume_clock(self) -> None:
        """The agent has its answer: its clock runs again."""
        with self._lock:
            if self._runs_since is None:
                self._runs_since = time.monotonic()

    def close(self) -> None:
        """End the session: reject a waiting call and stop the agent."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            last = self._last
        if last is not None and not last.is_done:
            last.reject(RequestRejected(ENDED, status=410, code="conversation_ended"))
        self._on_close()

    def _pause_clock(self) -> None:
        if self._runs_since is not None:
            self._own_s += time.monotonic() - self._runs_since
            self._runs_since = None


class Sessions:
    """The open sessions by API key."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._waker = WakeOnce(wake)
        self._open: dict[str, Session] = {}
        self._ended: deque[str] = deque(maxlen=MOST_ENDED)  # keys
        self._n_opened = 0
        self.on_close = no_connection  # closes the connections of a session whose agent has ended or is stopped

    def open(self, name: str) -> Session:
        """A new session with an unguessable API key."""
        self._n_opened += 1
        key = f"sk-{secrets.token_urlsafe(32)}"
        session = Session(key, self._n_opened, name, self._waker, lambda ended: self.on_close(ended))
        self._open[session.key] = session
        return session

    def find(self, key: str) -> Session | None:
        return self._open.get(key)

    def has_ended(self, key: str) -> bool:
        """Whether it is the key of one of the latest sessions that were closed."""
        return key in self._ended

    def close(self, session: Session) -> None:
        self._ended.append(session.key)
        self._open.pop(session.key, None)
        session.close()
        self.on_close(session)

    def close_all(self) -> None:
        for session in list(self._open.values()):
            self.close(session)
