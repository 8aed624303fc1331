"""The endpoint's HTTP server, on loopback: one API key a session (else 401), limits on connections and bodies."""

import asyncio
import select
import weakref
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from aiohttp import web

from actors.endpoint.external_agents import ExternalAgents, read_result
from actors.endpoint.openai_api import (
    ChatCompletion,
    RequestRejected,
    about_model,
    as_bytes,
    as_event,
    chunks,
    completion,
    error,
    read_call,
)
from actors.endpoint.sessions import ENDED, Pending, Session, Sessions, no_connection
from areal_bus.transport.web_server import HOST, SILENT_S, WebServer

BODY_BYTES = 2 << 20  # the rendered body stays far below the limit of a bus message
RETRIES = "x-stainless-retry-count"  # header of OpenAI's clients: number of retries
CHAT, MODELS = "/v1/chat/completions", "/v1/models"
OPEN, CLOSE = "/v1/episodes", "/v1/episodes/close"  # of agents outside the job
SESSION = web.RequestKey("session", Session)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class EndpointServer:
    """Serves on a thread until it is closed."""

    def __init__(
        self,
        sessions: Sessions,
        *,
        model: str,
        n_connections: int,
        silent_s: float = SILENT_S,
        external: ExternalAgents | None = None,
    ) -> None:
        """`silent_s`: a connection without a complete request for this long is closed. `external`: agents that open
        and close episodes themselves. Raises OSError when their port is taken.
        """
        self._external = external
        self._sessions, self._model, self._silent_s = sessions, model, silent_s
        self._most_idle = 0 if external is None else n_connections // 2  # one client has several conversations
        self._idle: weakref.WeakKeyDictionary[asyncio.BaseTransport, Session] = weakref.WeakKeyDictionary()
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[self._guard])
        app.add_routes(
            [web.get(MODELS, self._models), web.get(f"{MODELS}/{{id:.+}}", self._one), web.post(CHAT, self._chat)]
        )
        if external is not None:
            app.add_routes([web.post(OPEN, self._open), web.post(CLOSE, self._close)])
        shared_port = external.access.port if external is not None else None
        self._server = WebServer(
            app, name="endpoint", n_connections=n_connections, silent_s=silent_s, shared_port=shared_port
        )
        if external is not None:
            external.soon = self._server.thread.soon
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
            session = self._session(request)
            if session is not None:
                request[SESSION] = session
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
            more = f", {OPEN}, {CLOSE}" if self._external is not None else ""
            sentence = f"the endpoint has GET {MODELS} and POST {CHAT}{more} only"
            response = as_error(RequestRejected(sentence, status=404, code="not_found"))
        else:
            await response.prepare(request)
            await response.write_eof()
            self._keep(request.transport, session)
        return response

    def _session(self, request: web.Request) -> Session | None:
        """The session of the request's API key; None for an agent that opens one. Raises RequestRejected."""
        kind, _, key = request.headers.get("Authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        if self._external is not None and request.path == OPEN:
            self._external.check_key(key)
            return None
        session = self._sessions.find(key)
        if session is None and request.path == CLOSE and self._sessions.has_ended(key):
            raise has_ended()
        if session is None:
            raise RequestRejected(
                "a request must have the API key of an open conversation", status=401, code="invalid_api_key"
            )
        return session

    def _keep(self, connection: asyncio.BaseTransport | None, session: Session | None) -> None:
        """Keep a connection open for the next request of its session."""
        if connection is not None and session is not None:
            self._idle[connection] = session
            if not session.needs_connections:
                self._close_idle(session)

    def _close_idle(self, session: Session) -> None:
        """A client may be writing into a connection that is closed: external agents keep theirs while there is room."""
        if len(self._idle) <= self._most_idle:
            return
        for connection, of in list(self._idle.items()):
            if of is session:
                connection.close()

    async def _models(self, request: web.Request) -> web.Response:
        return reply({"object": "list", "data": [about_model(self._model)]})

    async def _one(self, request: web.Request) -> web.Response:
        """Any name is that of the one model, as in a call."""
        return reply(about_model(self._model))

    async def _chat(self, request: web.Request) -> web.Response:
        session, call = request[SESSION], read_call(await self._body(request))
        is_retry = request.headers.get(RETRIES, "0") != "0"
        pending = session.call(call, lambda: is_gone(request), is_retry=is_retry)
        choices = await pending.result()
        pending.is_delivered = not is_gone(request)
        return self._answer(session, pending, choices)

    async def _open(self, request: web.Request) -> web.Response:
        assert self._external is not None
        return reply(await self._external.open(lambda: is_gone(request)))

    async def _close(self, request: web.Request) -> web.Response:
        session = request[SESSION]
        if not session.end(read_result(await self._body(request))):
            raise has_ended()
        return reply({"id": session.name, "status": "closed"})

    async def _body(self, request: web.Request) -> bytes:
        """Raises ConnectionError for a body that does not arrive in time."""
        try:
            async with asyncio.timeout(self._silent_s):
                return await request.read()
        except TimeoutError:
            raise ConnectionError("the body did not arrive in time") from None

    def _answer(self, session: Session, pending: Pending, choices: Sequence[ChatCompletion]) -> web.Response:
        id, call = f"chatcmpl-{session.number}-{pending.number}", pending.call
        if not call.stream:
            return reply(completion(call, choices, id=id, model=self._model))
        events = [as_event(chunk) for chunk in chunks(call, choices, id=id, model=self._model)]
        return web.Response(body=b"".join([*events, b"data: [DONE]\n\n"]), content_type="text/event-stream")


def reply(record: dict[str, Any], *, status: int = 200) -> web.Response:
    return web.Response(body=as_bytes(record), status=status, content_type="application/json")


def as_error(rejection: RequestRejected) -> web.Response:
    """It closes the connection: the body may be unread."""
    response = reply(error(str(rejection), status=rejection.status, code=rejection.code), status=rejection.status)
    response.force_close()
    return response


def has_ended() -> RequestRejected:
    """Of an episode that is closed again."""
    return RequestRejected(f"{ENDED}: its first close, or its deadline, counts", status=409, code="episode_ended")


def is_gone(request: web.Request) -> bool:
    """Whether the client has disconnected, also where the event loop has not read that yet."""
    if request.transport is None or request.transport.is_closing():
        return True
    poll = select.poll()
    poll.register(request.transport.get_extra_info("socket"), select.POLLRDHUP)
    return bool(poll.poll(0))
