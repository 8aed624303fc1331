"""Messages to bytes and back: a small msgpack header and raw frames; knows nothing of sockets or of the ring's rules.

Layout: frame 0 is a msgpack map {"p": protocol, "j": job, "k": kind, "f": {field: value}, "n": [bytes of each frame]},
frames 1.. are the raw fields of the record in their declared order. Everything that arrives is checked against the
record's own types and everything that leaves against the same limits; docs/wire.md lists them. What breaks one is a
WireError.
"""

import dataclasses
import math
import operator
import reprlib
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

from areal_bus import messages
from areal_bus.errors import WireError
from areal_bus.header import MAX_HEADER_BYTES, pack_header, unpack_header
from areal_bus.messages import PROTOCOL, Finish, Message, Refund, Role, VerdictStatus

MAX_ARRAY_BYTES = 16 << 20  # 4 million tokens
MAX_TEXT_BYTES = 8 << 20  # all text frames of a message together: as Python's characters they may take four times that
MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, MAX_ARRAY_BYTES, MAX_TEXT_BYTES)

WORDS: dict[str, type[StrEnum]] = {  # fields that hold one of a few words
    "Join.role": Role,
    "Trajectory.finish": Finish,
    "Scored.finish": Finish,
    "Scored.status": VerdictStatus,
    "ShardItem.finish": Finish,
    "Unsampled.reason": Refund,
}
KINDS: dict[str, type] = {kind.__name__: kind for kind in typing.get_args(Message) if kind is not messages.Gone}
MAX_FRAMES = 1 + max(sum("frame" in f.metadata for f in dataclasses.fields(kind)) for kind in KINDS.values())


def encode(message: Message, *, job: str) -> list[bytes]:
    """Header and frames. Raises WireError for what the other side would refuse: over a cap, not finite, torn."""
    kind: type = type(message)
    schema = _schema(kind)
    fields = dict(zip(schema.plain, schema.of_plain(message), strict=True))
    for name, fits in schema.strict.items():
        if not fits(fields[name]):
            raise WireError(f"{kind.__name__}.{name} may not be {_show(fields[name])}", "fields")
    frames = [value.encode() if type(value) is str else value for value in schema.of_framed(message)]
    lengths = [len(frame) for frame in frames]
    if frames:
        _check_frames(schema, fields, frames, lengths)
    header = {"p": PROTOCOL, "j": job, "k": kind.__name__, "f": fields, "n": lengths}
    return [pack_header(header, kind.__name__), *frames]


def decode(frames: Sequence[bytes], *, job: str) -> Message:
    """The message, complete and typed. Raises WireError with the rule that the bytes break."""
    if not frames:
        raise WireError("a message has a header frame; this one has no frame", "frames")
    kind, fields, declared = _addressed(unpack_header(frames[0]), job)
    schema = _schema(kind)
    if fields.keys() != schema.plain.keys():
        raise WireError(f"{kind.__name__} has the fields {list(schema.plain)}; got {_show(list(fields))}", "fields")
    for name, fits in schema.plain.items():
        if not fits(fields[name]):
            raise WireError(f"{kind.__name__}.{name} may not be {_show(fields[name])}", "fields")
    raw = frames[1:]
    lengths = [len(frame) for frame in raw]
    if declared != lengths or len(schema.framed) != len(raw):
        raise WireError(f"{kind.__name__} declares frames of {_show(declared)} bytes; other ones came", "frames")
    if not raw:
        return typing.cast(Message, kind(**fields))
    _check_frames(schema, fields, raw, lengths)
    for name, frame, what in zip(schema.framed, raw, schema.framed.values(), strict=True):
        fields[name] = _text(frame) if what == "text" else frame
    return typing.cast(Message, kind(**fields))


def _addressed(header: dict[str, Any], job: str) -> tuple[type, dict[str, Any], Any]:
    """Kind, fields and frame lengths of a header that is in our protocol and of our job."""
    if type(header.get("p")) is not int:
        raise WireError("a header's p is the number of its protocol", "header")
    if header["p"] != PROTOCOL:  # first of all: another protocol may have another header
        raise WireError(f"protocol {PROTOCOL} is spoken here; the peer speaks {_show(header['p'])}", "protocol")
    if header.keys() != {"p", "j", "k", "f", "n"} or type(header["f"]) is not dict:
        raise WireError("a header is a map of p, j, k, f and n", "header")
    if not (type(header["j"]) is str and type(header["k"]) is str):
        raise WireError("a header's j and k are strings", "header")
    if header["j"] != job:
        raise WireError(f"only messages of job {job!r} are taken; this one is of {_show(header['j'])}", "job")
    kind = KINDS.get(header["k"])
    if kind is None:
        raise WireError(f"unknown kind of message {_show(header['k'])}", "kind")
    return kind, header["f"], header["n"]


def _check_frames(schema: "Schema", fields: Mapping[str, Any], frames: Sequence[bytes], lengths: Sequence[int]) -> None:
    """Raises WireError for arrays and texts over their caps, numbers that none can be, and lengths that disagree."""
    n_text = 0
    for frame, n, what in zip(frames, lengths, schema.framed.values(), strict=True):
        if what == "text":
            n_text += n
        else:
            _check_array(frame, n, what)
    if n_text > MAX_TEXT_BYTES:
        raise WireError(f"the text of a message is at most {MAX_TEXT_BYTES} bytes; this one has {n_text}", "size")
    if schema.has_tokens:
        _check_lengths(fields, lengths)


def _check_array(frame: bytes, n: int, what: str) -> None:
    """Little-endian int32 (token ids: none is negative) or float32 (finite): the highest byte of each number tells."""
    if n > MAX_ARRAY_BYTES:
        raise WireError(f"an array frame is at most {MAX_ARRAY_BYTES} bytes; this one has {n}", "size")
    if n % 4:
        raise WireError(f"an array frame has whole 4-byte numbers; this one has {n} bytes", "frames")
    highest = frame[3::4]
    if what == "int32" and not highest.isascii():
        raise WireError("an int32 frame has numbers from 0 on; one of these is negative", "numbers")
    if what == "float32" and (b"\x7f" in highest or b"\xff" in highest):
        raise WireError("a float32 frame has finite numbers under 1.7e38; one of these is none", "numbers")


def _check_lengths(fields: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """One id a token given or sampled, one log-prob and one stamped version a token sampled. Ids come first."""
    n_given = n_sampled = n_stamped = 0
    for given, sampled in fields["segments"]:
        n_given, n_sampled = n_given + given, n_sampled + sampled
    for _, n in fields["spans"]:
        n_stamped += n
    if (lengths[0], lengths[1], n_stamped) != (4 * (n_given + n_sampled), 4 * n_sampled, n_sampled):
        raise WireError(
            f"segments, spans, ids and log-probs must agree: there are {n_given} + {n_sampled} tokens, "
            f"{lengths[0] // 4} ids, {lengths[1] // 4} log-probs and {n_stamped} versions",
            "frames",
        )


def _text(frame: bytes) -> str:
    try:
        return frame.decode()
    except UnicodeDecodeError:
        raise WireError("a text frame is UTF-8", "text") from None


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def _show(value: Any) -> str:
    """For people; short whatever it is, and made without making much."""
    return _shown.repr(value)


Fits = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Schema:
    """How one kind of record travels."""

    plain: dict[str, Fits]  # header fields, with a check of their type
    framed: dict[str, str]  # fields that are frames, with what their bytes are
    strict: dict[str, Fits]  # of those that not every value of their type fits; checked before sending, too
    of_plain: Callable[[Any], tuple[Any, ...]]  # the values of either, of a record
    of_framed: Callable[[Any], tuple[Any, ...]]
    has_tokens: bool  # segments and spans say how long its first two frames, ids and log-probs, are


@cache
def _schema(kind: type) -> Schema:
    hints = typing.get_type_hints(kind)
    framed = {f.name: f.metadata["frame"] for f in dataclasses.fields(kind) if "frame" in f.metadata}
    names = [f.name for f in dataclasses.fields(kind) if f.name not in framed]
    words = {name: WORDS[f"{kind.__name__}.{name}"] for name in names if f"{kind.__name__}.{name}" in WORDS}
    plain = {name: _is_one_of(words[name]) if name in words else _fits(hints[name]) for name in names}
    strict = {name: plain[name] for name in words} | {name: math.isfinite for name in names if hints[name] is float}
    has_tokens = list(framed)[:2] == ["ids", "logps"] and "segments" in plain
    return Schema(plain, framed, strict, _values_of(list(plain)), _values_of(list(framed)), has_tokens=has_tokens)


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """A getter of these fields."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda record: tuple([getattr(record, name) for name in names])


def _is_one_of(words: type[StrEnum]) -> Fits:
    known = frozenset(map(str, words))
    return lambda value: (type(value) is str or isinstance(value, str)) and value in known


def _fits(hint: Any) -> Fits:
    """A check of one declared type: int, float, bool, str, list[...], dict[str, float] or a union of them."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        options = [_fits(arg) for arg in args]
        return lambda value: any(fits(value) for fits in options)
    if hint == list[list[int]]:
        return lambda value: type(value) is list and all(map(_is_pair, value))
    if origin is list:
        item = _fits(args[0])
        return lambda value: type(value) is list and all(map(item, value))
    if hint == dict[str, float]:  # figures for people: NaN says that there is none
        return lambda value: (
            type(value) is dict and all(type(k) is str and type(x) in (float, int) for k, x in value.items())
        )
    if hint is float:
        return lambda value: type(value) is int or (type(value) is float and math.isfinite(value))
    if hint is int:
        return lambda value: type(value) is int and -(2**63) <= value < 2**63
    if hint in (str, bool, type(None)):
        return lambda value: type(value) is hint
    raise TypeError(f"{messages.__name__} may not use {hint!r} in a header")


def _is_pair(value: Any) -> bool:
    """(tokens given, tokens sampled) or (version, tokens): two counts."""
    if type(value) is not list or len(value) != 2:
        return False
    one, two = value
    return type(one) is int and type(two) is int and 0 <= one < 2**63 and 0 <= two < 2**63
