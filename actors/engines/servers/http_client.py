"""HTTP client of one server, on a thread of its own: calls with a deadline, and streams whose events are queued."""

import asyncio
import json
import queue
from collections.abc import AsyncIterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Any

import httpx2

from areal_bus.errors import ConfigError, EngineLost
from areal_bus.process.loop_thread import LoopThread

SLACK_S = 1.0  # that the thread waits beyond the deadline of a call
CLOSE_S = 5.0
TEXT = 500  # characters of an answer that are shown


class ServerRejected(Exception):
    """The server answered with an error."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answers {status}: {text}")
        self.status, self.text = status, text


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """An event of a stream."""

    name: str
    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """The end of a stream. `status`: 200 if the server ended it, another one if it refused it, 0 if it broke."""

    name: str
    status: int
    text: str = ""


class HttpClient:
    """The connections to one server, and the queue of their events."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._events: queue.SimpleQueue[StreamEvent | StreamEnded] = queue.SimpleQueue()
        self._streams: dict[str, Future[None]] = {}
        self._thread = LoopThread("server")
        # No deadline here: each call has its own, and a stream may be silent. trust_env: no proxy is asked.
        # No connection is used twice: a server (uvicorn after 5 s) may close an idle one just as it is taken again.
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx2.AsyncClient(base_url=self.url, timeout=None, limits=limits, trust_env=False)

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float) -> Any:
        """The JSON of the answer, or its text. Raises ServerRejected for a status other than 200, else EngineLost."""
        return self.result(self.begin(method, path, body, timeout_s=timeout_s), timeout_s=timeout_s)

    def begin(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float
    ) -> "Future[Any]":
        """Start a call; returns a future."""
        return self._thread.run(self._call(method, path, body, timeout_s))

    def result(self, future: "Future[Any]", *, timeout_s: float) -> Any:
        """The result of a started call, as of `call`."""
        try:
            return future.result(timeout_s + SLACK_S)
        except FutureTimeout:
            raise EngineLost(f"the server at {self.url} must answer within {timeout_s:g} s: it has not") from None

    def stream(self, name: str, path: str, body: Mapping[str, Any]) -> None:
        """Start a POST whose answer is a stream of server-sent events."""
        stream = self._streams[name] = self._thread.run(self._stream(name, path, body))
        stream.add_done_callback(lambda _: self._streams.pop(name, None))

    def drop(self, name: str) -> None:
        """End a stream. Its queued events stay."""
        stream = self._streams.pop(name, None)
        if stream is not None:
            stream.cancel()

    def news(self, wait_s: float) -> list[StreamEvent | StreamEnded]:
        """New events, in order; waits up to `wait_s` for the first."""
        found: list[StreamEvent | StreamEnded] = []
        try:
            found.append(self._events.get(timeout=wait_s) if wait_s else self._events.get_nowait())
            while True:
                found.append(self._events.get_nowait())
        except queue.Empty:
            return found

    def close(self) -> None:
        """End all calls and streams, and the thread. A thread that does not end stays until the process ends."""
        closing = self._thread.run(self._close())
        try:
            closing.result(CLOSE_S)
        except (FutureTimeout, httpx2.HTTPError):
            return
        self._thread.close()

    async def _close(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._client.aclose()

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        try:
            async with asyncio.timeout(timeout_s):
                response = await self._client.request(method, path, json=None if body is None else dict(body))
        except TimeoutError:
            raise EngineLost(
                f"the server at {self.url} must answer {path} within {timeout_s:g} s: it has not"
            ) from None
        except (httpx2.HTTPError, OSError) as error:
            raise EngineLost(f"the server at {self.url} must answer {path}: {_why(error)}") from None
        if response.status_code != 200:
            raise ServerRejected(response.status_code, response.text[:TEXT])
        try:
            return response.json()
        except (ValueError, RecursionError):
            return response.text[:TEXT]

    async def _stream(self, name: str, path: str, body: Mapping[str, Any]) -> None:
        ended = StreamEnded(name, 200)
        try:
            async with self._client.stream("POST", path, json=dict(body)) as response:
                if response.status_code != 200:
                    ended = StreamEnded(
                        name, response.status_code, (await response.aread()).decode(errors="replace")[:TEXT]
                    )
                    return
                async for line in _lines(response.aiter_bytes()):
                    if line.startswith(b"data:") and not line.endswith(b"[DONE]"):
                        self._events.put(StreamEvent(name, json.loads(line[5:])))
        except (httpx2.HTTPError, OSError, ValueError, RecursionError) as error:
            ended = StreamEnded(name, 0, _why(error))
        finally:
            self._events.put(ended)


def done(answer: Any) -> Mapping[str, Any]:
    """The JSON object of an answer. Raises ServerRejected if it is no object or reports a failure."""
    if not isinstance(answer, Mapping) or answer.get("success") is False:
        raise ServerRejected(200, str(answer)[:TEXT])
    return answer


def perform(
    link: HttpClient, path: str, body: Mapping[str, Any], *, timeout_s: float, reports_success: bool = True
) -> None:
    """One call of the server. Raises EngineLost if it is rejected or, where the answer says so, has failed."""
    try:
        answer = link.call("POST", path, body, timeout_s=timeout_s)
        if reports_success:
            done(answer)
    except ServerRejected as error:
        raise EngineLost(f"{link.url} must do {path}: {error}") from None


def weights_rejected(link: HttpClient, label: str, error: ServerRejected, *, is_known: bool) -> Exception:
    """The error of a rejected load: ConfigError for the first weights (another model), EngineLost later."""
    if is_known:
        return EngineLost(f"{link.url} must take weights {label}: {error}")
    return ConfigError(
        f"the server must serve the model of this run: {link.url} did not take its weights ({error}); start "
        "it with the folder of model.path"
    )


def ping(link: HttpClient, path: str, *, timeout_s: float) -> None:
    """Raises EngineLost unless the server answers, also that it has no such path."""
    try:
        link.call("GET", path, timeout_s=timeout_s)
    except ServerRejected as error:
        if error.status != 404:
            raise EngineLost(f"the server at {link.url} must answer {path}: {error}") from None


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Of an event stream, in linear time: a text in it may hold what else is taken for the end of a line (U+2028)."""
    rest = bytearray()
    async for piece in pieces:
        rest += piece
        if b"\n" in piece:
            *lines, rest = rest.split(b"\n")
            for line in lines:
                yield bytes(line.rstrip(b"\r"))
    yield bytes(rest)


def _why(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
