"""Servers of real processes, and requests to them as bytes."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from areal_bus.process.isolation import CHILD, child_path
from areal_bus.process.parent_death import die_with_parent

SERVE = (*CHILD, "areal_serve")
ANSWER_S = 120.0
Server = Mapping[str, str]


class NoAnswer(Exception):
    """The front has ended before it answered, or forgot a future when it ended."""


@contextmanager
def serving(
    folder: Path, *words: str, command: Sequence[str] = SERVE, variables: dict[str, str] | None = None, code: int = 0
) -> Iterator[dict[str, str]]:
    """A server's two lines as variables, RUN, its folder, and PID. It must end with `code`."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TINKER")} | (
        variables or {}
    )
    with (folder / "err").open("wb") as errors:
        process = subprocess.Popen(
            [*command, *words, "--set", f"run.folder={folder}"],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment | {"PYTHONPATH": child_path()},
            preexec_fn=die_with_parent,  # this process may be killed
        )
    try:
        assert process.stdout is not None
        lines = [process.stdout.readline().strip() for _ in range(2)]
        assert all(lines), (folder / "err").read_text(encoding="utf-8")
        (run,) = folder.glob("serve/*")
        yield dict(line.split("=", 1) for line in lines) | {"RUN": str(run), "PID": str(process.pid)}
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == code
        if process.stdout is not None:
            process.stdout.close()


def pids(server: Server, role: str) -> list[int]:
    """Processes of this server, by the words of their command lines. `role`: front, trainer or sampler."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode().split("\0")
        except OSError:
            continue
        module = "areal_serve.process" if role == "front" else "areal_serve.worker"
        if module in words and server["RUN"] in words and (role == "front" or role in words):
            found.append(int(path.parent.name))
    return sorted(found)


def raw(server: Server, data: bytes, *, ends: bool = False) -> tuple[int, bytes]:
    """Status and body of the answer to these bytes; (0, b"") when the connection closes without one. `ends`: after
    them nothing more is sent.
    """
    url = urlsplit(server["TINKER_BASE_URL"])
    assert url.hostname is not None
    found = b""
    with socket.create_connection((url.hostname, url.port or 0), ANSWER_S) as connection:
        try:
            connection.sendall(data)
            if ends:
                connection.shutdown(socket.SHUT_WR)
            while part := connection.recv(1 << 16):
                found += part
        except ConnectionError:  # it refused the rest
            pass
    head, _, body = found.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def post(server: Server, path: str, body: bytes, *headers: str, key: str | None = None, length: str = "") -> bytes:
    """The bytes of a request that asks for the end of the connection."""
    lines = [
        f"POST /api/v1{path} HTTP/1.1",
        "Host: x",
        "Connection: close",
        f"X-API-Key: {server['TINKER_API_KEY'] if key is None else key}",
        *headers,
        length or f"Content-Length: {len(body)}",
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def call(server: Server, path: str, given: Any) -> Any:
    """The answer to a request that must be accepted: what JSON holds, or bytes."""
    request = post(server, path, given if isinstance(given, bytes) else json.dumps(given).encode())
    while (answer := raw(server, request))[0] == 408:  # a future that is not done
        pass
    status, found = answer
    if status in (0, 410):
        raise NoAnswer(found)
    assert status == 200, found
    return json.loads(found) if found[:1] == b"{" else found


def result(server: Server, path: str, given: Any) -> Any:
    """The result of the future that is promised."""
    return call(server, "/retrieve_future", {"request_id": call(server, path, given)["request_id"]})


def model_name(server: Server) -> str:
    """Of the base model, as the server lists it."""
    key = f"X-API-Key: {server['TINKER_API_KEY']}"
    request = f"GET /api/v1/get_server_capabilities HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{key}\r\n\r\n"
    return str(json.loads(raw(server, request.encode())[1])["supported_models"][0]["model_name"])
