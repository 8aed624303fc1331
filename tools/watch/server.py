"""Serves the live page of a run on the loopback interface. Its URL contains a secret token."""

import asyncio
import json
import os
import secrets
import time
from dataclasses import asdict
from http import HTTPStatus
from pathlib import Path
from types import TracebackType

from aiohttp import web

from areal_bus.errors import ConfigError
from areal_bus.transport.web_server import HOST, WebServer
from tools.report.page.episodes_page import samples_page
from tools.watch.live_run import Frame, LiveRun
from tools.watch.metrics import METRICS_TYPE, exposition

PAGE = Path(__file__).with_name("page.html")
TOKEN = "AREALBUS_WATCH_TOKEN"  # of the environment: a token that stays the same, for Prometheus
FRESH_S = 1.0  # several pages of one run cost no more than one
N_CONNECTIONS = 64  # a browser opens up to six for a page
HEADERS = {"Cache-Control": "no-store", "Referrer-Policy": "no-referrer", "X-Content-Type-Options": "nosniff"}


class PageServer:
    """One run, one token. The journal is read only when a page asks. A context manager: its end closes it."""

    def __init__(self, live: LiveRun, port: int = 0) -> None:
        """Raises ConfigError when the port is taken."""
        self.token = os.environ.get(TOKEN) or secrets.token_urlsafe(16)
        self._live, self._lock = live, asyncio.Lock()
        self._frame: Frame | None = None
        self._read_at = 0.0  # monotonic
        app = web.Application()
        app.router.add_get("/{path:.*}", self._answer)
        try:
            self._server = WebServer(app, name="watch", n_connections=N_CONNECTIONS, address=(HOST, port))
        except OSError as error:
            raise ConfigError(f"--port must be free on {HOST}: {port}: {error.strerror}") from None
        self.port = self._server.port

    def __enter__(self) -> "PageServer":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._server.close()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/?token={self.token}"

    async def _answer(self, request: web.Request) -> web.Response:
        """GET / is the page, /samples that of episodes, /frame.json the newest frame, /metrics its figures."""
        if not self._is_allowed(request):
            return response(HTTPStatus.FORBIDDEN, "text/plain", b"the URL needs the token that tools.watch printed\n")
        if request.path == "/":
            nonce = secrets.token_urlsafe(12)
            return response(
                HTTPStatus.OK, "text/html", PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).encode(), nonce
            )
        if request.path == "/frame.json":
            body = json.dumps(asdict(await self._newest()), allow_nan=False).encode()
            return response(HTTPStatus.OK, "application/json", body)
        if request.path == "/samples":
            body = await asyncio.to_thread(samples_page, self._live.where, dict(request.query))
            return web.Response(body=body, content_type="text/html", charset="utf-8", headers=HEADERS)
        if request.path == "/metrics":
            body = exposition(await self._newest()).encode()
            return web.Response(body=body, headers={**HEADERS, "Content-Type": METRICS_TYPE})
        return response(HTTPStatus.NOT_FOUND, "text/plain", b"there is /, /samples, /frame.json and /metrics\n")

    def _is_allowed(self, request: web.Request) -> bool:
        """Whether the token is right, and the name of the host is ours: a foreign name may point to this address."""
        hosts = {f"{name}:{self.port}" for name in (HOST, "localhost")}
        given = request.query.get("token", "").encode(errors="replace")
        return secrets.compare_digest(given, self.token.encode()) and request.headers.get("Host") in hosts

    async def _newest(self) -> Frame:
        async with self._lock:
            if self._frame is None or time.monotonic() - self._read_at >= FRESH_S:
                self._frame = await asyncio.to_thread(self._live.frame)
                self._read_at = time.monotonic()
            return self._frame


def response(status: HTTPStatus, kind: str, body: bytes, nonce: str = "") -> web.Response:
    own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
    policy = {"Content-Security-Policy": f"default-src 'none'; {own}img-src data:; base-uri 'none'"}
    return web.Response(status=status, body=body, content_type=kind, charset="utf-8", headers={**HEADERS, **policy})
