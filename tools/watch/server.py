"""Serves the live page of a run on the loopback interface. Its URL contains a secret token."""

import json
import secrets
import threading
import time
from dataclasses import asdict
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from areal_bus.errors import ConfigError
from tools.watch.live_run import Frame, LiveRun

HOST = "127.0.0.1"
PAGE = Path(__file__).with_name("page.html")
FRESH_S = 1.0  # several pages of one run cost no more than one


class PageServer(ThreadingHTTPServer):
    """One run, one token. The journal is read only when a page asks."""

    daemon_threads = True

    def __init__(self, live: LiveRun, port: int = 0) -> None:
        """Raises ConfigError when the port is taken."""
        try:
            super().__init__((HOST, port), PageHandler)
        except OSError as error:
            raise ConfigError(f"--port must be free on {HOST}: {port}: {error.strerror}") from None
        self.token = secrets.token_urlsafe(16)
        self._live, self._lock = live, threading.Lock()
        self._frame: Frame | None = None
        self._read_at = 0.0  # monotonic

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    def frame(self) -> Frame:
        with self._lock:
            if self._frame is None or time.monotonic() - self._read_at >= FRESH_S:
                self._frame = self._live.frame()
                self._read_at = time.monotonic()
            return self._frame


class PageHandler(BaseHTTPRequestHandler):
    """Answers GET / with the page and GET /frame.json with the newest frame."""

    server: PageServer

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        if not self._is_allowed(address.query):
            self._send(HTTPStatus.FORBIDDEN, "text/plain", b"the URL needs the token that tools.watch printed\n")
        elif address.path == "/":
            nonce = secrets.token_urlsafe(12)
            self._send(
                HTTPStatus.OK, "text/html", PAGE.read_text(encoding="utf-8").replace("NONCE", nonce).encode(), nonce
            )
        elif address.path == "/frame.json":
            body = json.dumps(asdict(self.server.frame()), allow_nan=False).encode()
            self._send(HTTPStatus.OK, "application/json", body)
        else:
            self._send(HTTPStatus.NOT_FOUND, "text/plain", b"there is / and /frame.json\n")

    def _is_allowed(self, query: str) -> bool:
        """Whether the token is right, and the name of the host is ours: a foreign name may point to this address."""
        given = parse_qs(query).get("token", [""])[0]
        hosts = {f"{name}:{self.server.server_port}" for name in (HOST, "localhost")}
        is_known = secrets.compare_digest(given.encode(), self.server.token.encode())
        return is_known and self.headers.get("Host") in hosts

    def _send(self, status: HTTPStatus, kind: str, body: bytes, nonce: str = "") -> None:
        own = f"script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; " if nonce else ""
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Content-Security-Policy", f"default-src 'none'; {own}img-src data:; base-uri 'none'")
        for name, value in (
            ("Cache-Control", "no-store"),
            ("Referrer-Policy", "no-referrer"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print no requests: they contain the token."""
