"""Conversations between threads: calls come in by key, the generator's loop answers; knows no HTTP and no tokens.

A key is known from its conversation's begin to its end. One call is under way at a time, for the tokens of a
conversation are in one order.
"""

import contextlib
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from actors.endpoint.openai_api import ChatCall, ChatCompletion, RequestRejected

ENDED = "this conversation has ended"


@dataclass(frozen=True, slots=True)
class AgentEnded:
    """The agent is done: what it returned, or why it did not."""

    returned: dict[str, Any] | None
    error: str = ""
    place: str = ""  # FILE:LINE in its code that the error is of
    trace: str = ""  # the traceback, for people
    is_unusable: bool = False  # the agent's code does not load: no conversation will do better


class Pending:
    """One call under way: answered or refused once, from the loop's thread; waited for in the server's."""

    def __init__(self, call: ChatCall, number: int, client_is_gone: Callable[[], bool], session: "Session") -> None:
        self.call, self.number = call, number
        self.client_is_gone = client_is_gone  # while it is not heard
        self.is_heard = False  # the answer was written to its client
        self._session = session
        self._done = threading.Event()
        self._sampled: ChatCompletion | None = None
        self._refused: RequestRejected | None = None

    def answer(self, sampled: ChatCompletion) -> None:
        self._sampled = sampled
        self._end()

    def refuse(self, refused: RequestRejected) -> None:
        self._refused = refused
        self._end()

    def wait(self, timeout_s: float) -> bool:
        """Whether it is done."""
        return self._done.wait(timeout_s)

    def result(self) -> ChatCompletion:
        """Of a call that is done. Raises Refused."""
        if self._refused is not None:
            raise self._refused
        if self._sampled is None:
            raise RuntimeError("only what is done has a result")
        return self._sampled

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    @property
    def is_unheard(self) -> bool:
        """Its client went away before."""
        return not self.is_heard and self.client_is_gone()

    def _end(self) -> None:
        self._session.ran_again()
        self._done.set()


class WakeOnce:
    """Wakes the loop once until it has looked: what is put after it looked wakes it again."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._is_rung = False

    def ring(self) -> None:
        """After the news was put, from any thread."""
        if not self._is_rung:
            self._is_rung = True
            self._wake()

    def heard(self) -> None:
        """The loop looks now."""
        self._is_rung = False


class Session:
    """One conversation. The server's threads call, the agent's thread ends it, the loop takes both and closes it."""

    def __init__(self, key: str, number: int, name: str, bell: WakeOnce) -> None:
        self.key, self.number, self.name = key, number, name
        self._bell = bell
        self._news: queue.SimpleQueue[Pending | AgentEnded] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._last: Pending | None = None
        self._n_calls = 0
        self._is_closed = False
        self._connections: set[socket.socket] = set()
        self._on_close: Callable[[], None] = lambda: None
        self._own_s = 0.0  # that the agent took for itself, up to:
        self._runs_since: float | None = None  # None: it waits for the model, or has not begun

    # the server's threads

    def hold(self, connection: socket.socket) -> None:
        """It carries requests of this conversation, and ends with it: clients forget theirs."""
        with self._lock:
            self._connections.add(connection)

    def let_go(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.discard(connection)

    def call(self, call: ChatCall, client_is_gone: Callable[[], bool], *, says_again: bool = False) -> Pending:
        """Put a call to the model; the one before, where its client did not hear the answer and comes with it again.

        `says_again`: the client says so itself. Raises Refused.
        """
        with self._lock:
            if self._is_closed:
                raise RequestRejected(ENDED, status=401, code="invalid_api_key")
            last = self._last
            if last is not None and last.call.body == call.body and (says_again or last.is_unheard):
                last.client_is_gone = client_is_gone
                return last
            if last is not None and not last.is_done:
                raise RequestRejected(
                    "a conversation has one call under way at a time: the one before is not answered yet"
                )
            self._pause_clock()
            self._n_calls += 1
            self._last = Pending(call, self._n_calls, client_is_gone, self)
            self._news.put(self._last)
        self._bell.ring()
        return self._last

    # the agent's thread

    def begin(self, on_close: Callable[[], None]) -> bool:
        """The agent begins; `on_close` is called once, from any thread, when nobody wants it any more.

        False when that is so already.
        """
        with self._lock:
            if not self._is_closed:
                self._on_close, self._runs_since = on_close, time.monotonic()
            return not self._is_closed

    def restart_clock(self) -> None:
        """All until now was none of the agent's own time."""
        with self._lock:
            self._own_s, self._runs_since = 0.0, time.monotonic()

    def end(self, ended: AgentEnded) -> None:
        self._news.put(ended)
        self._bell.ring()

    @property
    def own_s(self) -> float:
        """Time that the agent took for itself: while it waits for the model its clock stands."""
        with self._lock:
            return self._own_s + (0.0 if self._runs_since is None else time.monotonic() - self._runs_since)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    # the loop

    def has_news(self) -> bool:
        self._bell.heard()
        return not self._news.empty()

    def news(self) -> Pending | AgentEnded:
        """The oldest there is; `has_news` said so."""
        return self._news.get_nowait()

    def ran_again(self) -> None:
        """The agent has its answer."""
        with self._lock:
            if self._runs_since is None:
                self._runs_since = time.monotonic()

    def close(self) -> None:
        """Nothing more is wanted of it; whoever waits is told."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            last, connections = self._last, list(self._connections)
        if last is not None and not last.is_done:
            last.refuse(RequestRejected(ENDED, status=410, code="conversation_ended"))
        self._on_close()
        for connection in connections:
            with contextlib.suppress(OSError):  # it has ended already
                connection.shutdown(socket.SHUT_RD)  # what is being written is still written

    def _pause_clock(self) -> None:
        if self._runs_since is not None:
            self._own_s += time.monotonic() - self._runs_since
            self._runs_since = None


class Sessions:
    """The conversations that are open, by key."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._bell = WakeOnce(wake)
        self._open: dict[str, Session] = {}
        self._n_opened = 0

    def open(self, name: str) -> Session:
        """A conversation with a key of its own that nobody can guess."""
        self._n_opened += 1
        session = Session(f"sk-{secrets.token_urlsafe(32)}", self._n_opened, name, self._bell)
        self._open[session.key] = session
        return session

    def find(self, key: str) -> Session | None:
        return self._open.get(key)

    def close(self, session: Session) -> None:
        self._open.pop(session.key, None)
        session.close()

    def close_all(self) -> None:
        for session in list(self._open.values()):
            self.close(session)
