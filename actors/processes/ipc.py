"""Frames between a pool and its worker processes: a length (4 bytes, little-endian), then one JSON object.

Both sides limit the size of sent and received frames; a frame over the limit raises ValueError.
"""

import json
import struct
from typing import Any

LENGTH = struct.Struct("<I")
REQUEST_BYTES = 16 << 20  # a prompt, a completion and a row
REPLY_BYTES = 64 << 10  # a verdict, with the traceback of an error
compact = json.JSONEncoder(separators=(",", ":")).encode


def pack(record: dict[str, Any], *, cap_bytes: int) -> bytes:
    body = compact(record).encode()
    if len(body) > cap_bytes:
        raise ValueError(f"a frame must be at most {cap_bytes} bytes: this one has {len(body)}")
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
        raise ValueError(f"a frame must be at most {cap_bytes} bytes: this one claims {length}")


def read(body: bytes) -> dict[str, Any]:
    """Decode the body of a frame. Raises ValueError unless it is a JSON object."""
    record = json.loads(body)
    if not isinstance(record, dict):
        raise ValueError(f"a frame must hold one JSON object: this one holds a {type(record).__name__}")
    return record
