"""The endpoint's HTTP server: listens on loopback, authenticates requests by API key, waits for the loop's answers.

A request without the key of an open session gets 401. Each connection has a thread; the number of connections and the
size of bodies are limited, and idle connections are closed.
"""

import contextlib
import select
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from loguru import logger

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
from actors.endpoint.sessions import Pending, Session, Sessions

BODY_BYTES = 2 << 20  # the rendered body stays far below the limit of a bus message
DISCARD_BYTES = 256 << 20  # read from a longer body and discarded, so that the client receives the error
SILENT_S = 30.0
STOP_S = 0.1  # poll interval of the shutdown request
CLIENT_CHECK_S = 0.5  # interval at which a waiting request checks its client
RETRIES = "x-stainless-retry-count"  # header of OpenAI's clients: number of retries
CHAT, MODELS = "/v1/chat/completions", "/v1/models"


class EndpointServer:
    """Serves on threads until it is closed."""

    def __init__(self, sessions: Sessions, *, model: str, n_connections: int, silent_s: float = SILENT_S) -> None:
        """`silent_s`: a connection without a complete request for this long is closed."""
        self._http = HttpServer(sessions, model, n_connections, silent_s)
        self._thread = threading.Thread(target=self._http.serve_forever, args=(STOP_S,), name="endpoint", daemon=True)
        self._thread.start()

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1"

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()


class HttpServer(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(self, sessions: Sessions, model: str, n_connections: int, silent_s: float) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.sessions, self.model, self._silent_s = sessions, model, silent_s
        self._free = threading.BoundedSemaphore(n_connections)
        self.idle: dict[socket.socket, float] = {}  # connections without a complete request -> idle since

    def service_actions(self) -> None:
        """Close idle connections, slow senders included. Called periodically."""
        for connection, since in list(self.idle.items()):
            if time.monotonic() - since > self._silent_s:
                with contextlib.suppress(OSError):  # closed already
                    connection.shutdown(socket.SHUT_RDWR)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # the system cannot start a thread
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        logger.debug("the endpoint lost a connection of {}", client_address, exc_info=True)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "areal-bus"
    sys_version = ""
    timeout = SILENT_S
    disable_nagle_algorithm = True  # else a response waits 40 ms for the ACK of its headers
    wbufsize = -1  # headers and body are written together
    server: HttpServer
    _has_aborted = False  # the handler of the last call ended without an answer
    _held: Session | None = None  # session of the connection's requests

    def setup(self) -> None:
        super().setup()
        self._mark_idle()

    def handle_expect_100(self) -> bool:
        """Flush at once: the client waits for 100 Continue."""
        super().handle_expect_100()
        self.wfile.flush()
        return True

    def _mark_idle(self) -> None:
        self.server.idle[self.connection] = time.monotonic()

    def _mark_busy(self) -> None:
        self.server.idle.pop(self.connection, None)

    def do_GET(self) -> None:
        self._serve(self._get)

    def do_POST(self) -> None:
        self._serve(self._post)

    def _serve(self, act: Any) -> None:
        """Serve a request. A rejection is sent as an error and closes the connection: its body may be unread."""
        try:
            act(self._session())
        except RequestRejected as rejection:
            self.close_connection = True
            self._send(error(str(rejection), status=rejection.status, code=rejection.code), status=rejection.status)
        except OSError:
            self.close_connection = True  # the client is gone
        finally:
            self._mark_idle()

    def _session(self) -> Session:
        """The session of the request's API key. Raises RequestRejected."""
        kind, _, key = self.headers.get("Authorization", "").partition(" ")
        session = self.server.sessions.find(key.strip()) if kind.lower() == "bearer" else None
        if session is None:
            raise RequestRejected(
                "a request must have the API key of an open conversation", status=401, code="invalid_api_key"
            )
        if session is not self._held:
            self._release()
            self._held = session
            session.hold(self.connection)
        return session

    def _release(self) -> None:
        if self._held is not None:
            self._held.release(self.connection)
            self._held = None

    def finish(self) -> None:
        self._mark_busy()
        self._release()
        super().finish()

    def _get(self, session: Session) -> None:
        if self.path.partition("?")[0] != MODELS:
            raise RequestRejected(f"the endpoint has GET {MODELS} and POST {CHAT} only", status=404, code="not_found")
        self._send(models(self.server.model))

    def _post(self, session: Session) -> None:
        if self.path.partition("?")[0] != CHAT:
            raise RequestRejected(f"the endpoint has GET {MODELS} and POST {CHAT} only", status=404, code="not_found")
        body = self._body()
        self._mark_busy()
        call = read_call(body)
        self._has_aborted = False
        is_retry = self.headers.get(RETRIES, "0") != "0"
        pending = session.call(call, self._client_is_gone, is_retry=is_retry)
        try:
            while not pending.wait(CLIENT_CHECK_S):
                self._check_client()
            sampled = pending.result()
            self._check_client()
            self._answer(session, pending, sampled)
            pending.is_delivered = True
        finally:
            self._has_aborted = not pending.is_delivered

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit():
            raise RequestRejected("a request must have a Content-Length", status=411, code="length_required")
        if len(length) > 12 or int(length) > BODY_BYTES:
            self._discard(min(int(length[:12]), DISCARD_BYTES))
            raise RequestRejected(f"a body has at most {BODY_BYTES} bytes: this one has {length[:12]}", status=413)
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            raise ConnectionError("the body ended early")
        return body

    def _discard(self, n_bytes: int) -> None:
        """Read and discard the body: a client that is still sending does not read the response."""
        while n_bytes > 0 and (piece := self.rfile.read(min(n_bytes, 1 << 16))):
            n_bytes -= len(piece)

    def _check_client(self) -> None:
        if self._client_is_gone():
            raise ConnectionError("the client disconnected before the answer")

    def _client_is_gone(self) -> bool:
        """Whether the client has disconnected. Thread-safe."""
        try:
            poll = select.poll()
            poll.register(self.connection, select.POLLIN)
            return self._has_aborted or (bool(poll.poll(0)) and not self.connection.recv(1, socket.MSG_PEEK))
        except (OSError, ValueError):
            return True

    def _answer(self, session: Session, pending: Pending, sampled: ChatCompletion) -> None:
        id, call, model = f"chatcmpl-{session.number}-{pending.number}", pending.call, self.server.model
        if not call.stream:
            self._send(completion(call, sampled, id=id, model=model))
            return
        events = [as_event(chunk) for chunk in chunks(call, sampled, id=id, model=model)]
        self._write(b"".join([*events, b"data: [DONE]\n\n"]), "text/event-stream", 200)

    def _send(self, record: dict[str, Any], *, status: int = 200) -> None:
        self._write(as_bytes(record), "application/json", status)

    def _write(self, body: bytes, kind: str, status: int) -> None:
        with contextlib.suppress(OSError) if status != 200 else contextlib.nullcontext():
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            if self.close_connection:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)
            self.wfile.flush()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        if code != 200:
            super().log_request(code, size)

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug("endpoint: {}", format % args)
