"""The endpoint's HTTP server, on loopback: one API key a session (else 401), limits on connections and bodies."""

import asyncio
import select
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import web

from actors.endpoint.openai_api import (
    ChatCompletion,
    RequestRejected,
    as_bytes,
    as_event,
    chunks,
    completion,
    error,
    models,
    read_call,
)
from actors.endpoint.sessions import Pending, Session, Sessions, no_connection
from areal_bus.transport.web_server import HOST, SILENT_S, WebServer

BODY_BYTES = 2 << 20  # the rendered body stays far below the limit of a bus message
RETRIES = "x-stainless-retry-count"  # header of OpenAI's clients: number of retries
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
SESSION = web.RequestKey("session", Session)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """Serves on a thread until it is closed."""

    def __init__(self, sessions: Sessions, *, model: str, n_connections: int, silent_s: float = SILENT_S) -> None:
        """`silent_s`: a connection without a complete request for this long is closed."""
        self._sessions, self._model, self._silent_s = sessions, model, silent_s
        self._idle: weakref.WeakKeyDictionary[asyncio.BaseTransport, Session] = weakref.WeakKeyDictionary()
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard])
        app.add_routes([web.get(MODELS, self._models), web.post(CHAT, self._chat)])
        self._server = WebServer(app, name="endpoint", n_connections=n_connections, silent_s=silent_s)
        sessions.on_close = lambda session: self._server.thread.soon(lambda: self._close_idle(session))

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self._server.port}/v1"

    def close(self) -> None:
        """Stop serving. A session that closes later has no connection."""
        self._sessions.on_close = no_connection
        self._server.close()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Authenticate, and answer with OpenAI's errors. The connection ends with its session, or with a rejection."""
        try:
            session = request[SESSION] = self._session(request)
            if request.transport is not None:
                self._idle.pop(request.transport, None)
            response = await handler(request)
        except RequestRejected as rejection:
            response = as_error(rejection)
        except web.HTTPRequestEntityTooLarge:
            response = as_error(
                RequestRejected(f"a body has at most {BODY_BYTES} bytes: this one has more", status=413)
            )
        except web.HTTPException:
            sentence = f"the endpoint has GET {MODELS} and POST {CHAT} only"
            response = as_error(RequestRejected(sentence, status=404, code="not_found"))
        else:
            await response.prepare(request)
            await response.write_eof()
            self._keep(request.transport, session)
        return response

    def _session(self, request: web.Request) -> Session:
        """The session of the request's API key. Raises RequestRejected."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        session = self._sessions.find(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise RequestRejected(
                "a request must have the API key of an open conversation", status=401, code="invalid_api_key"
            )
        return session

    def _keep(self, connection: asyncio.BaseTransport | None, session: Session) -> None:
        """Keep a connection open for the next request of its session."""
        if connection is not None:
            self._idle[connection] = session
            if not session.needs_connections:
                connection.close()

    def _close_idle(self, session: Session) -> None:
        for connection, of in list(self._idle.items()):
            if of is session:
                connection.close()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response(models(self._model))

    async def _chat(self, request: web.Request) -> web.Response:
        session, call = request[SESSION], read_call(await self._body(request))
        is_retry = request.headers.get(RETRIES, "0") != "0"
        pending = session.call(call, lambda: is_gone(request), is_retry=is_retry)
        sampled = await pending.result()
        pending.is_delivered = not is_gone(request)
        return self._answer(session, pending, sampled)

    async def _body(self, request: web.Request) -> bytes:
        """Raises ConnectionError for a body that does not arrive in time."""
        try:
            async with asyncio.timeout(self._silent_s):
                return await request.read()
        except TimeoutError:
            raise ConnectionError("the body did not arrive in time") from None

    def _answer(self, session: Session, pending: Pending, sampled: ChatCompletion) -> web.Response:
        id, call = f"chatcmpl-{session.number}-{pending.number}", pending.call
        if not call.stream:
            return reply(completion(call, sampled, id=id, model=self._model))
        events = [as_event(chunk) for chunk in chunks(call, sampled, id=id, model=self._model)]
        return web.Response(body=b"".join([*events, b"data: [DONE]\n\n"]), content_type="text/event-stream")


def reply(record: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=as_bytes(record), status=status, content_type="application/json")


def as_error(rejection: RequestRejected) -> web.Response:
    """It closes the connection: the body may be unread."""
    response = reply(error(str(rejection), status=rejection.status, code=rejection.code), status=rejection.status)
    response.force_close()
    return response


def is_gone(request: web.Request) -> bool:
    """Whether the client has disconnected, also where the event loop has not read that yet."""
    if request.transport is None or request.transport.is_closing():
        return True
    poll = select.poll()
    poll.register(request.transport.get_extra_info("socket"), select.POLLRDHUP)
    return bool(poll.poll(0))
