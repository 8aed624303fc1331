"""Messages to bytes and back: a small msgpack header and raw frames; knows nothing of sockets or of what is impossible.

Layout: frame 0 is a msgpack map {"p": protocol, "j": job, "k": kind, "f": {field: value}, "n": [bytes of each frame]},
frames 1.. are the raw fields of the record in their declared order. Everything that arrives is checked against the
record's own types: unknown or missing fields, wrong types, lengths that disagree, a deep or large header: WireError.
"""

import dataclasses
import types
import typing
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import msgpack

from areal_bus import messages
from areal_bus.errors import WireError
from areal_bus.messages import PROTOCOL, Message

MAX_HEADER_BYTES = 64 << 10
MAX_DEPTH = 8
MAX_ARRAY_BYTES = 64 << 20  # 16 million tokens
MAX_TEXT_BYTES = 16 << 20

KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message)}


def encode(message: Message, *, job: str) -> list[bytes]:
    """Header and frames. Raises WireError when the header is over its cap (nothing oversize is ever sent)."""
    kind: type = type(message)
    plain, framed = _schema(kind)
    frames = [_to_frame(getattr(message, name), what) for name, what in framed]
    header = {
        "p": PROTOCOL,
        "j": job,
        "k": kind.__name__,
        "f": {name: getattr(message, name) for name in plain},
        "n": [len(frame) for frame in frames],
    }
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"a header is at most {MAX_HEADER_BYTES} bytes; this {kind.__name__} has {len(packed)}")
    return [packed, *frames]


def decode(frames: Sequence[bytes], *, job: str) -> Message:
    """The message, complete and typed. Raises WireError with the rule that the bytes break."""
    if not frames:
        raise WireError("a message has a header frame; this one has no frame")
    header = _header(frames[0])
    if header["p"] != PROTOCOL:
        raise WireError(f"protocol {PROTOCOL} is spoken here; the peer speaks {header['p']}")
    if header["j"] != job:
        raise WireError(f"only messages of job {job!r} are taken; this one is of {header['j']!r:.80}")
    kind = KINDS.get(header["k"])
    if kind is None:
        raise WireError(f"unknown kind of message {header['k']!r:.80}")
    plain, framed = _schema(kind)
    fields: dict[str, Any] = header["f"]
    if fields.keys() != plain.keys():
        raise WireError(f"{kind.__name__} has the fields {sorted(plain)}; got {sorted(map(str, fields))!s:.200}")
    for name, fits in plain.items():
        if not fits(fields[name]):
            raise WireError(f"{kind.__name__}.{name} has another type than declared: {fields[name]!r:.80}")
    if header["n"] != [len(frame) for frame in frames[1:]] or len(framed) != len(frames) - 1:
        raise WireError(f"{kind.__name__} declares frames of {header['n']!s:.80} bytes; other ones came")
    raw = {name: _from_frame(frame, what) for (name, what), frame in zip(framed, frames[1:], strict=True)}
    return typing.cast(Message, kind(**fields, **raw))


def _header(packed: bytes) -> dict[str, Any]:
    if len(packed) > MAX_HEADER_BYTES:
        raise WireError(f"a header is at most {MAX_HEADER_BYTES} bytes; this one has {len(packed)}")
    try:
        header = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=_no_duplicates,
            ext_hook=_no_ext,
            max_ext_len=0,
            max_bin_len=0,
        )
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"a header is one msgpack map: {type(error).__name__}") from None
    if type(header) is not dict or header.keys() != {"p", "j", "k", "f", "n"} or type(header["f"]) is not dict:
        raise WireError("a header is a map of p, j, k, f and n")
    if not (type(header["p"]) is int and type(header["j"]) is str and type(header["k"]) is str):
        raise WireError("a header's p is an integer, its j and k are strings")
    if _depth(header, MAX_DEPTH) < 0:
        raise WireError(f"a header is nested at most {MAX_DEPTH} deep")
    return header


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise WireError("a header has no key twice")
    return made


def _no_ext(code: int, _data: bytes) -> Any:
    raise WireError(f"a header has no ext types; this one has type {code}")


def _depth(value: Any, left: int) -> int:
    """What is left of the allowed depth below value; negative when it was not enough."""
    if left < 0 or not isinstance(value, (dict, list)):
        return left
    return min((_depth(v, left - 1) for v in (value.values() if isinstance(value, dict) else value)), default=left)


def _to_frame(value: Any, what: str) -> bytes:
    frame: bytes = value.encode() if what == "text" else value
    cap = MAX_TEXT_BYTES if what == "text" else MAX_ARRAY_BYTES
    if len(frame) > cap:
        raise WireError(f"a {what} frame is at most {cap} bytes; this one has {len(frame)}")
    return frame


def _from_frame(frame: bytes, what: str) -> Any:
    if what == "text":
        if len(frame) > MAX_TEXT_BYTES:
            raise WireError(f"a text frame is at most {MAX_TEXT_BYTES} bytes; this one has {len(frame)}")
        try:
            return frame.decode()
        except UnicodeDecodeError:
            raise WireError("a text frame is UTF-8") from None
    if len(frame) > MAX_ARRAY_BYTES or len(frame) % 4:
        raise WireError(f"an array frame has whole 4-byte numbers, at most {MAX_ARRAY_BYTES} bytes; got {len(frame)}")
    return frame


Fits = Callable[[Any], bool]


@cache
def _schema(kind: type) -> tuple[dict[str, Fits], list[tuple[str, str]]]:
    """Header fields with their type checks, and framed fields with what their bytes are."""
    hints = typing.get_type_hints(kind)
    plain: dict[str, Fits] = {}
    framed: list[tuple[str, str]] = []
    for field in dataclasses.fields(kind):
        what = field.metadata.get("frame")
        if what is not None:
            framed.append((field.name, what))
        else:
            plain[field.name] = _fits(hints[field.name])
    return plain, framed


def _fits(hint: Any) -> Fits:
    """A check of one declared type: int, float, bool, str, list[...], dict[str, ...] or a union of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_fits(arg) for arg in args]
        return lambda value: any(fits(value) for fits in options)
    if origin is list:
        item = _fits(args[0])
        return lambda value: type(value) is list and all(map(item, value))
    if origin is dict:
        item = _fits(args[1])
        return lambda value: (
            type(value) is dict and all(type(key) is str and item(entry) for key, entry in value.items())
        )
    if hint is float:
        return lambda value: type(value) in (float, int)
    if hint is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint in (str, bool, type(None)):
        return lambda value: type(value) is hint
    raise TypeError(f"{messages.__name__} may not use {hint!r} in a header")
