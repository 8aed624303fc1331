"""Frames between a process and its worker: length (4 bytes, little-endian), a JSON object; too long: ValueError."""

import contextlib
import io
import json
import os
import resource
import struct
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_bus.process.parent_death import die_with_parent

LENGTH = struct.Struct("<I")
REQUEST_BYTES = 16 << 20  # a prompt, a completion and a row
REPLY_BYTES = 64 << 10  # a verdict, with the traceback of an error
ROWS_BYTES = (1 << 32) - 1  # rows of a data set, or the state of a loader: no limit but that of the length
PRINTED_BYTES = 64 << 20  # largest size of the output file; later output is discarded
WATCH_S = 0.05  # between two looks at it
compact = json.JSONEncoder(separators=(",", ":")).encode


def pack(record: dict[str, Any], *, cap_bytes: int) -> bytes:
    body = compact(record).encode()
    if len(body) > cap_bytes:
        raise ValueError(f"frame too large: {len(body)} bytes, and at most {cap_bytes} are allowed")
    return LENGTH.pack(len(body)) + body


def unpack(buffer: bytearray, *, cap_bytes: int) -> dict[str, Any] | None:
    """Take the first frame out of `buffer`; None while it is incomplete. Raises ValueError for an invalid frame."""
    if len(buffer) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack_from(buffer)
    check(length, cap_bytes=cap_bytes)
    end = LENGTH.size + length
    if len(buffer) < end:
        return None
    body = bytes(buffer[LENGTH.size : end])
    del buffer[:end]
    return read(body)


def check(length: int, *, cap_bytes: int) -> None:
    """Raises ValueError for a length over the limit."""
    if length > cap_bytes:
        raise ValueError(f"frame too large: it claims {length} bytes, and at most {cap_bytes} are allowed")


def read(body: bytes) -> dict[str, Any]:
    """Decode the body of a frame. Raises ValueError unless it is a JSON object that this process can read."""
    try:
        record = json.loads(body)
    except RecursionError:
        raise ValueError("the JSON of a frame is nested too deep") from None
    if not isinstance(record, dict):
        raise ValueError(f"invalid frame: it holds a {type(record).__name__}, not one JSON object")
    return record


class Channel:
    """A worker's side: pipes taken from stdin and stdout, which user code finds on /dev/null. Ends with its starter."""

    def __init__(self, parent: int, *, most_bytes: int | None = None, prints_to: int | None = None) -> None:
        """`most_bytes`: of a frame, if not REQUEST_BYTES and REPLY_BYTES. `prints_to`: the file for standard output."""
        die_with_parent(parent)
        self._pid = os.getpid()
        self._request_bytes, self._reply_bytes = most_bytes or REQUEST_BYTES, most_bytes or REPLY_BYTES
        self._requests, self._replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 0)
        os.dup2(nowhere if prints_to is None else prints_to, 1)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while (request := self.read()) is not None:
            yield request

    def read(self) -> dict[str, Any] | None:
        """The next frame; None at the end of the channel."""
        head = self._requests.read(LENGTH.size)
        if len(head) < LENGTH.size:
            return None
        (length,) = LENGTH.unpack(head)
        check(length, cap_bytes=self._request_bytes)
        body = self._requests.read(length)
        return read(body) if len(body) == length else None

    def reply(self, record: dict[str, Any]) -> None:
        """A fork that user code made ends here instead. Raises ValueError over the limit; nothing is written then."""
        if os.getpid() != self._pid:
            os._exit(1)
        self._replies.write(pack(record, cap_bytes=self._reply_bytes))
        self._replies.flush()

    def close(self) -> None:
        """For a fork: it neither reads nor replies."""
        os.close(self._requests.fileno())
        os.close(self._replies.fileno())


def limit_damage() -> None:
    """Disable core files, and make the OOM killer prefer this process to the actors."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError):  # not available in every container; only a preference
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="utf-8")


def keep_prints(path: str | None) -> None:
    """Append standard output to this file, line by line. Without a file, output is discarded."""
    if path is not None and isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # disk full or no permission: only the output is lost
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
            os.dup2(file, 1)
            os.close(file)
            sys.stdout.reconfigure(line_buffering=True)


def limit_prints() -> None:
    """Discard further output once the file has PRINTED_BYTES."""
    with contextlib.suppress(OSError):  # user code has closed it
        if os.fstat(1).st_size > PRINTED_BYTES:
            os.write(1, f"\n(over {PRINTED_BYTES >> 20} MiB: later output is discarded)\n".encode())
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 1)
            os.close(nowhere)


def limit_prints_always() -> None:
    """`limit_prints` beside user code that runs for long: one call may print without end."""

    def watch() -> None:
        while True:
            limit_prints()
            time.sleep(WATCH_S)

    threading.Thread(target=watch, name="prints", daemon=True).start()
