"""Connections of a web server: their number and their time are limited."""

import contextlib
import socket
from collections.abc import Iterator

import pytest
from aiohttp import web

from areal_bus.transport.web_server import HOST, WebServer

REQUEST = b"GET / HTTP/1.1\r\nHost: me\r\n\r\n"
WAIT_S = 30.0


@contextlib.contextmanager
def serving(*, n_connections: int = 8, silent_s: float = WAIT_S) -> Iterator[WebServer]:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/", answer)
    server = WebServer(app, name="web", n_connections=n_connections, silent_s=silent_s)
    try:
        yield server
    finally:
        server.close()


def connected(server: WebServer) -> socket.socket:
    return socket.create_connection((HOST, server.port), WAIT_S)


def test_web_server_closes_a_connection_over_the_limit() -> None:
    with serving(n_connections=2) as server, connected(server) as one, connected(server) as other:
        for connection in (one, other):
            connection.sendall(REQUEST)
            assert connection.recv(12) == b"HTTP/1.1 200"
        with connected(server) as third:
            assert third.recv(1) == b""


def test_web_server_closes_a_connection_that_sends_nothing() -> None:
    with serving(silent_s=0.1) as server, connected(server) as connection:
        assert connection.recv(1) == b""


@pytest.mark.parametrize(
    "sent", [b"nonsense\r\n\r\n", b"GET / HTTP/1.1\r\nHost: me\r\nx: " + b"x" * 20_000 + b"\r\n\r\n"]
)
def test_web_server_rejects_a_malformed_request_and_logs_nothing(sent: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with serving() as server, connected(server) as connection:
        connection.sendall(sent)
        assert connection.recv(12).endswith(b" 400")
    assert not caplog.records


def test_web_server_frees_its_port_at_its_end() -> None:
    with serving() as server, pytest.raises(OSError, match="in use"):
        WebServer(web.Application(), name="other", n_connections=1, address=(HOST, server.port))
    WebServer(web.Application(), name="other", n_connections=1, address=(HOST, server.port)).close()
