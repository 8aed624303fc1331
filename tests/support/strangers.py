"""Hostile peers at a listening socket: raw connections, raw ZMTP and messages of any shape."""

import os
import pickle
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import zmq

from areal_bus.messages import Message, Partial
from areal_bus.transport.bus import DEFAULT, Bus, BusOptions
from areal_bus.transport.curve import Keyring
from areal_bus.transport.listener import LINGER_MS, connect_curve

JOB = "job"
PATIENCE_S = 20.0
NAME = b"generator-66.0/0123456789abcdef"
GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + b"\0" * 32
READY = b"\x04\x26\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER\x08Identity\x00\x00\x00\x00"


class Canary:
    """Unpickling it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return (Path.write_text, (self.path, "it was unpickled"))


def canary(path: Path) -> bytes:
    return pickle.dumps(Canary(path))


def word(n: int) -> Partial:
    """Any message that a head and a generator may send each other."""
    return Partial(n, 0, 0, 0, segments=[[1, 1]], spans=[[0, 1]], ids=b"\0" * 8, logps=b"\0" * 4)


class OpenBus(Bus):
    """Accepts any message from any sender, to test the transport alone."""

    def __init__(self, name: str, *, options: BusOptions = DEFAULT, **settings: Any) -> None:
        super().__init__(name, options=replace(options, authorise=lambda *_: None), **settings)


def next_of(bus: Bus) -> tuple[str, Message]:
    got = bus.receive(PATIENCE_S)
    if got is None:
        raise TimeoutError(f"no message within {PATIENCE_S:g} s; refused: {bus.refused}")
    return got


class Dealer:
    """A plain DEALER that sends arbitrary frames."""

    def __init__(self, endpoint: str, identity: bytes = NAME, keys: Keyring | None = None) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, LINGER_MS)
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.IDENTITY, identity)
        if keys is not None:
            connect_curve(self.socket, keys, "head")
        self.socket.connect(endpoint)

    def send(self, *frames: bytes) -> None:
        self.socket.send_multipart(frames)

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@contextmanager
def dealer(endpoint: str, identity: bytes = NAME, keys: Keyring | None = None) -> Iterator[Dealer]:
    one = Dealer(endpoint, identity, keys)
    try:
        yield one
    finally:
        one.close()


def dial(endpoint: str) -> socket.socket:
    """A raw connection to an ipc or tcp endpoint."""
    if endpoint.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(endpoint.removeprefix("ipc://"))
        except OSError:
            connection.close()
            raise
        return connection
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)))


RAW = {
    "nothing": b"",
    "garbage": os.urandom(4096),
    "zeros": b"\0" * 4096,
    "a web browser": b"GET / HTTP/1.1\r\nHost: head\r\n\r\n",
    "a TLS hello": bytes.fromhex("16030100c8010000c40303") + os.urandom(197),
    "half a greeting": GREETING[:20],
    "a greeting and no more": GREETING,
    "a greeting and garbage": GREETING + os.urandom(1000),
    "a frame of 2^62 bytes": GREETING + READY + b"\x02" + (1 << 62).to_bytes(8, "big") + b"x" * 100,
    "a frame over the cap": GREETING + READY + b"\x02" + (1 << 30).to_bytes(8, "big") + b"x" * 100,
    "a frame that never ends": GREETING + READY + b"\x02" + (1 << 20).to_bytes(8, "big") + b"x" * 100,
}


def say_raw(endpoint: str, sayings: Sequence[bytes]) -> None:
    """One connection for each message, closed after it."""
    for saying in sayings:
        with dial(endpoint) as connection:
            try:
                connection.sendall(saying)
            except ConnectionError:  # it was hung up on
                continue
