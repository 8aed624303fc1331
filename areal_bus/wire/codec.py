"""Encodes and decodes messages: a small msgpack header and raw frames. Pure: no I/O.

Layout: frame 0 is a msgpack map {"p": protocol, "j": job, "k": kind, "f": {field: value}, "n": [bytes of each frame]};
frames 1.. are the raw fields of the record in their declared order. Incoming messages are checked against the types of
the record, outgoing ones against the same limits (docs/wire.md). A violation raises WireError.
"""

import re
import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgpack

from areal_bus.errors import WireError
from areal_bus.foreign_text import cut, valid
from areal_bus.messages import MAX_NAMES, MAX_PAIRS, MAX_TEXT_BYTES, PROTOCOL, Longest, Message
from areal_bus.sample_fields import unpacked
from areal_bus.wire.header import MAX_HEADER_BYTES, UNPACK_ERRORS, check_cost, pack_header, unpack_checked
from areal_bus.wire.schema import KINDS, Schema, schema_of

MAX_ARRAY_BYTES = 16 << 20  # 4 million tokens
MAX_NAME = 255  # characters of a name or an endpoint in a list of them
MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, MAX_ARRAY_BYTES, MAX_TEXT_BYTES)
MAX_FRAMES = 1 + max(len(schema_of(kind).framed) for kind in KINDS.values())

PARTS = {"p", "j", "k", "f", "n"}
FAST_BYTES = 4096  # maximum header for the fast path, which copies it; nearly all are much shorter
MAP16 = b"\xde"  # msgpack's first byte of a map with 16 entries or more; a two-byte count follows
UINT64 = 0xCF  # msgpack's first byte of unsigned 64-bit integers

_PAIR = rb'\["[^"]*+", ?+"[^"]*+"\]'
TURNS = re.compile(rb"\[%b(?:, ?+%b){0,%d}+\]" % (_PAIR, _PAIR, MAX_PAIRS - 1))  # JSON without escaped quotes

Read = tuple[Schema, dict[str, Any]]  # schema and fields, in their declared order


def encode(message: Message, *, job: str) -> list[bytes]:
    """Header and frames. Raises WireError for a message that the receiver would reject.

    Prose over its limit is cut, and lone surrogates are replaced: a model or user code may have written them.
    """
    try:
        return _encoded(message, job)
    except (TypeError, ValueError, AttributeError) as error:  # a field is not of its declared type
        raise WireError(f"{type(message).__name__} cannot be encoded: {error}", "fields") from None


def _encoded(message: Message, job: str) -> list[bytes]:
    kind: type = type(message)
    schema = schema_of(kind)
    fields = schema.plain_of(message)
    for name, limit in schema.longest:
        if len(fields[name]) > limit.n:
            fields[name] = _cut(kind, name, fields[name], limit)
    for name, fits in schema.strict:
        if not fits(fields[name]):
            raise WireError(f"invalid value of {kind.__name__}.{name}: {_show(fields[name])}", "fields")
    frames = [value if type(value) is bytes else _as_text(value) for value in schema.framed_of(message)]
    lengths = list(map(len, frames))
    if frames:
        _check_frames(schema, fields, frames, lengths)
    header = {"p": PROTOCOL, "j": job, "k": kind.__name__, "f": fields, "n": lengths}
    return [pack_header(header, kind.__name__), *frames]


def decode(frames: Sequence[bytes], *, job: str) -> Message:
    """The decoded message. Raises WireError with the violated rule."""
    if not frames:
        raise WireError("missing header frame of a message", "frames")
    header, *raw = frames
    n_containers = check_cost(header)
    lengths = list(map(len, raw))
    schema, fields = _read_fast(header, job, lengths) or _read(unpack_checked(header, n_containers), job, lengths)
    values = list(fields.values())
    if raw:
        _check_frames(schema, fields, raw, lengths)
        values[schema.first_frame : schema.first_frame] = raw
        try:
            for at in schema.texts:
                values[at] = values[at].decode()
            for at in schema.names_at:
                values[at] = _as_names(values[at])
        except UnicodeDecodeError:
            raise WireError("invalid text frame: it must be UTF-8", "text") from None
    message: Message = schema.kind(*values)
    return message


def check(message: Message) -> None:
    """Raises WireError for a message that cannot be sent, so that its maker can do something about it."""
    encode(message, job="")


def _cut(kind: type, name: str, text: str, limit: Longest) -> str:
    """Prose up to its limit. Raises WireError for any other text."""
    if not limit.is_prose:
        raise WireError(f"{kind.__name__}.{name} is too long: {len(text)} characters, at most {limit.n}", "fields")
    return cut(text, limit.n)


def _as_text(value: str | list[str]) -> bytes:
    """A text, or names as lines, in UTF-8."""
    text = value if isinstance(value, str) else "\n".join(value)
    try:
        return text.encode()
    except UnicodeEncodeError:
        return valid(text).encode()


def _as_names(lines: bytes) -> list[str]:
    """The names of a frame that `_check_frames` has accepted."""
    return lines.decode().split("\n") if lines else []


def _read_fast(packed: bytes, job: str, lengths: list[int]) -> Read | None:
    """Fast path of `_read` for headers as `encode` writes them; None for every other header, valid or not.

    The bytes before the fields determine the kind and the number of fields, so duplicates are detected. The rest is
    unpacked as a list: fields, "n" and the lengths.
    """
    if len(packed) > FAST_BYTES:
        return None
    start = packed.find(b"\xa1f") + 2
    schema = _by_opening(job).get(packed[: start + (3 if packed[start : start + 1] == MAP16 else 1)])
    if schema is None:
        return None
    try:
        fields, key, declared = msgpack.unpackb(b"\x93" + packed[start:])
    except UNPACK_ERRORS:
        return None
    if key != "n" or declared != lengths or len(schema.framed) != len(lengths):
        return None
    return (schema, fields) if schema.fits_fast(fields, are_small=UINT64 not in packed) else None


@cache
def _by_opening(job: str) -> dict[bytes, Schema]:
    return {_opening(schema, job): schema for schema in map(schema_of, KINDS.values()) if schema.is_flat}


def _opening(schema: Schema, job: str) -> bytes:
    """First bytes of a header of that kind: everything before its fields, and their number."""
    envelope: bytes = msgpack.packb({"p": PROTOCOL, "j": job, "k": schema.kind.__name__})
    n = len(schema.names)
    return b"\x85" + envelope[1:] + b"\xa1f" + (bytes([0x80 + n]) if n < 16 else MAP16 + n.to_bytes(2, "big"))


def _read(header: dict[str, Any], job: str, lengths: list[int]) -> Read:
    """Validate all fields. Raises WireError."""
    kind, fields, declared = _check_envelope(header, job)
    schema = schema_of(kind)
    if fields.keys() != schema.plain.keys():
        raise WireError(f"{kind.__name__} has the fields {list(schema.plain)}; got {_show(list(fields))}", "fields")
    for name, fits in schema.plain.items():
        if not fits(fields[name]):
            raise WireError(f"invalid value of {kind.__name__}.{name}: {_show(fields[name])}", "fields")
    if declared != lengths or len(schema.framed) != len(lengths):
        rule = f"{kind.__name__} must contain the frames that it declares"
        raise WireError(f"{rule}: {_show(declared)} bytes; got {_show(lengths)}", "frames")
    return schema, {name: fields[name] for name in schema.names}


def _check_envelope(header: dict[str, Any], job: str) -> tuple[type, dict[str, Any], Any]:
    """Kind, fields and frame lengths of a header. Raises WireError for another protocol or job."""
    if type(header.get("p")) is not int:
        raise WireError("a header's p is the number of its protocol", "header")
    if header["p"] != PROTOCOL:  # checked first: another protocol may have another header
        raise WireError(f"both sides must use protocol {PROTOCOL}; the peer uses {_show(header['p'])}", "protocol")
    if header.keys() != PARTS or type(header["f"]) is not dict:
        raise WireError("invalid header: it must be a map of p, j, k, f and n", "header")
    if not (type(header["j"]) is str and type(header["k"]) is str):
        raise WireError("invalid header: j and k must be strings", "header")
    if header["j"] != job:
        raise WireError(f"only messages of job {job!r} are accepted; this one is of {_show(header['j'])}", "job")
    kind = KINDS.get(header["k"])
    if kind is None:
        raise WireError(f"unknown kind of message: {_show(header['k'])}", "kind")
    return kind, header["f"], header["n"]


def _check_frames(schema: Schema, fields: Mapping[str, Any], frames: Sequence[bytes], lengths: Sequence[int]) -> None:
    """Raises WireError for oversize arrays and texts, invalid numbers, and lengths that disagree.

    Arrays are little-endian: the highest byte of each number shows a negative id or a non-finite log-prob.
    """
    n_text = sum(lengths)
    if schema.has_tokens:
        n_ids, n_logps = lengths[0], lengths[1]
        n_text -= n_ids + n_logps
        if n_ids > MAX_ARRAY_BYTES or n_ids % 4:
            raise _bad_array(n_ids)
        if not frames[0][3::4].isascii():
            raise WireError("negative number in an int32 frame", "numbers")
        if n_logps > MAX_ARRAY_BYTES or n_logps % 4:
            raise _bad_array(n_logps)
        _check_finite(frames[1])
    if schema.has_fields:
        n_text -= lengths[-1]
        _check_fields(frames[-1], lengths[1])
    if n_text > MAX_TEXT_BYTES:
        raise WireError(f"text too large: {n_text} bytes, and at most {MAX_TEXT_BYTES} are allowed", "size")
    if schema.has_tokens:
        _check_lengths(fields, lengths)
    for at in schema.names_at:
        _check_names(schema, frames[at - schema.first_frame])
    if schema.turns_at is not None:
        _check_turns(frames[schema.turns_at - schema.first_frame])


def _check_finite(numbers: bytes) -> None:
    """Raises WireError for a float32 that is large or not finite."""
    highest = numbers[3::4]
    if 0x7F in highest or 0xFF in highest:
        raise WireError("invalid number in a float32 frame: it has finite numbers below 1.7e38", "numbers")


def _check_fields(frame: bytes, n_bytes: int) -> None:
    """One number of each field for each sampled token, whose log-probs have `n_bytes`."""
    names, numbers = unpacked(frame)
    if len(frame) > MAX_ARRAY_BYTES or len(numbers) != len(names) * n_bytes:
        rule = f"{len(names)} of them for {n_bytes // 4} sampled tokens are {len(names) * n_bytes} bytes"
        raise WireError(f"mismatch of fields: {rule}, at most {MAX_ARRAY_BYTES}; there are {len(numbers)}", "frames")
    _check_finite(numbers)


def _check_names(schema: Schema, lines: bytes) -> None:
    """Raises WireError for a name that is empty or long, or too many of them."""
    n = lines.count(b"\n") + bool(lines)
    if n > MAX_NAMES:
        raise WireError(f"{schema.kind.__name__} lists at most {MAX_NAMES} names; this one lists {n}", "size")
    lengths = set(map(len, lines.split(b"\n"))) if lines else set()
    if lengths and not 1 <= min(lengths) <= max(lengths) <= MAX_NAME:
        rule = f"a name in {schema.kind.__name__} has 1 to {MAX_NAME} bytes"
        raise WireError(f"{rule}; got {min(lengths)} to {max(lengths)}", "fields")


def _check_turns(turns: bytes) -> None:
    """Raises WireError unless these are pairs of texts as JSON; escapes are not checked. Builds no objects."""
    if turns and TURNS.fullmatch(turns.replace(rb"\\", b"").replace(rb"\"", b"")) is None:
        raise WireError(f"invalid turns of a sample: JSON of at most {MAX_PAIRS} pairs of texts is needed", "text")


def _bad_array(n: int) -> WireError:
    if n > MAX_ARRAY_BYTES:
        return WireError(f"array frame too large: {n} bytes, and at most {MAX_ARRAY_BYTES} are allowed", "size")
    return WireError(f"invalid array frame of {n} bytes: it must have whole 4-byte numbers", "frames")


def _check_lengths(fields: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """Each token has one id; each sampled token has one log-prob and one version."""
    n_given = n_sampled = n_stamped = 0
    for given, sampled in fields["segments"]:
        n_given += given
        n_sampled += sampled
    for _, n in fields["spans"]:
        n_stamped += n
    if n_stamped != n_sampled or lengths[1] != 4 * n_sampled or lengths[0] != 4 * (n_given + n_sampled):
        found = f"{lengths[0] // 4} ids, {lengths[1] // 4} log-probs and {n_stamped} versions"
        rule = "segments, spans, ids and log-probs must agree"
        raise WireError(f"{rule}: there are {n_given} + {n_sampled} tokens, {found}", "frames")


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def _show(value: Any) -> str:
    """Short text of any value, built in bounded memory."""
    return _shown.repr(value)
