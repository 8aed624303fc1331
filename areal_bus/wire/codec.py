"""Messages to bytes and back: a small msgpack header and raw frames; knows nothing of sockets or of the ring's rules.

Layout: frame 0 is a msgpack map {"p": protocol, "j": job, "k": kind, "f": {field: value}, "n": [bytes of each frame]},
frames 1.. are the raw fields of the record in their declared order. Everything that arrives is checked against the
record's own types and everything that leaves against the same limits; docs/wire.md lists them. What breaks one is a
WireError.
"""

import reprlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgpack

from areal_bus.errors import WireError
from areal_bus.messages import PROTOCOL, Message
from areal_bus.wire.header import MAX_HEADER_BYTES, NO_MSGPACK, pack_header, unpack_weighed, weigh
from areal_bus.wire.schema import KINDS, Schema, schema_of

MAX_ARRAY_BYTES = 16 << 20  # 4 million tokens
MAX_TEXT_BYTES = 8 << 20  # all text frames of a message together: as Python's characters they may take four times that
MAX_FRAME_BYTES = max(MAX_HEADER_BYTES, MAX_ARRAY_BYTES, MAX_TEXT_BYTES)
MAX_FRAMES = 1 + max(len(schema_of(kind).framed) for kind in KINDS.values())

PARTS = {"p", "j", "k", "f", "n"}
GLANCE_BYTES = 4096  # of a header that is judged at a glance, which reads a copy: nearly all are shorter by far
MAP16 = b"\xde"  # msgpack's first byte of a map with 16 entries or more; their number follows, in two bytes
UINT64 = 0xCF  # msgpack's first byte of each number from 2^63 on, and of others

Read = tuple[Schema, dict[str, Any]]  # of a header: its kind, and its fields in their declared order


def encode(message: Message, *, job: str) -> list[bytes]:
    """Header and frames. Raises WireError for what the other side would refuse: over a cap, not finite, torn."""
    kind: type = type(message)
    schema = schema_of(kind)
    fields = schema.plain_of(message)
    for name, fits in schema.strict:
        if not fits(fields[name]):
            raise WireError(f"{kind.__name__}.{name} may not be {_show(fields[name])}", "fields")
    frames = [value.encode() if type(value) is str else value for value in schema.framed_of(message)]
    lengths = list(map(len, frames))
    if frames:
        _check_frames(schema, fields, frames, lengths)
    header = {"p": PROTOCOL, "j": job, "k": kind.__name__, "f": fields, "n": lengths}
    return [pack_header(header, kind.__name__), *frames]


def decode(frames: Sequence[bytes], *, job: str) -> Message:
    """The message, complete and typed. Raises WireError with the rule that the bytes break."""
    if not frames:
        raise WireError("a message has a header frame; this one has no frame", "frames")
    header, *raw = frames
    n_containers = weigh(header)
    lengths = list(map(len, raw))
    schema, fields = _glance(header, job, lengths) or _read(unpack_weighed(header, n_containers), job, lengths)
    values = list(fields.values())
    if raw:
        _check_frames(schema, fields, raw, lengths)
        values[schema.first_frame : schema.first_frame] = raw
        try:
            for at in schema.texts:
                values[at] = values[at].decode()
        except UnicodeDecodeError:
            raise WireError("a text frame is UTF-8", "text") from None
    message: Message = schema.kind(*values)
    return message


def _glance(packed: bytes, job: str, lengths: list[int]) -> Read | None:
    """What `_read` finds in a header that is as `encode` makes them; None for any other, whatever is wrong with it.

    The bytes before the fields say what they are and how many, so that none can come twice unseen. The rest is read
    as a list: fields, an "n" and the lengths.
    """
    if len(packed) > GLANCE_BYTES:
        return None
    start = packed.find(b"\xa1f") + 2
    schema = _by_opening(job).get(packed[: start + (3 if packed[start : start + 1] == MAP16 else 1)])
    if schema is None:
        return None
    try:
        fields, key, declared = msgpack.unpackb(b"\x93" + packed[start:])
    except NO_MSGPACK:
        return None
    if key != "n" or declared != lengths or len(schema.framed) != len(lengths):
        return None
    return (schema, fields) if schema.fits_at_a_glance(fields, are_small=UINT64 not in packed) else None


@cache
def _by_opening(job: str) -> dict[bytes, Schema]:
    return {_opening(schema, job): schema for schema in map(schema_of, KINDS.values()) if schema.is_flat}


def _opening(schema: Schema, job: str) -> bytes:
    """How a header of that kind begins: all before its fields, and how many they are."""
    addressed: bytes = msgpack.packb({"p": PROTOCOL, "j": job, "k": schema.kind.__name__})
    n = len(schema.names)
    return b"\x85" + addressed[1:] + b"\xa1f" + (bytes([0x80 + n]) if n < 16 else MAP16 + n.to_bytes(2, "big"))


def _read(header: dict[str, Any], job: str, lengths: list[int]) -> Read:
    """Its fields, each looked at. Raises WireError."""
    kind, fields, declared = _addressed(header, job)
    schema = schema_of(kind)
    if fields.keys() != schema.plain.keys():
        raise WireError(f"{kind.__name__} has the fields {list(schema.plain)}; got {_show(list(fields))}", "fields")
    for name, fits in schema.plain.items():
        if not fits(fields[name]):
            raise WireError(f"{kind.__name__}.{name} may not be {_show(fields[name])}", "fields")
    if declared != lengths or len(schema.framed) != len(lengths):
        raise WireError(f"{kind.__name__} declares frames of {_show(declared)} bytes; other ones came", "frames")
    return schema, {name: fields[name] for name in schema.names}


def _addressed(header: dict[str, Any], job: str) -> tuple[type, dict[str, Any], Any]:
    """Kind, fields and frame lengths of a header that is in our protocol and of our job."""
    if type(header.get("p")) is not int:
        raise WireError("a header's p is the number of its protocol", "header")
    if header["p"] != PROTOCOL:  # first of all: another protocol may have another header
        raise WireError(f"protocol {PROTOCOL} is spoken here; the peer speaks {_show(header['p'])}", "protocol")
    if header.keys() != PARTS or type(header["f"]) is not dict:
        raise WireError("a header is a map of p, j, k, f and n", "header")
    if not (type(header["j"]) is str and type(header["k"]) is str):
        raise WireError("a header's j and k are strings", "header")
    if header["j"] != job:
        raise WireError(f"only messages of job {job!r} are taken; this one is of {_show(header['j'])}", "job")
    kind = KINDS.get(header["k"])
    if kind is None:
        raise WireError(f"unknown kind of message {_show(header['k'])}", "kind")
    return kind, header["f"], header["n"]


def _check_frames(schema: Schema, fields: Mapping[str, Any], frames: Sequence[bytes], lengths: Sequence[int]) -> None:
    """Raises WireError for arrays and texts over their caps, numbers that none can be, and lengths that disagree.

    Arrays are little-endian: the highest byte of each number tells whether an id is negative, a log-prob not finite.
    """
    n_text = sum(lengths)
    if schema.has_tokens:
        n_ids, n_logps = lengths[0], lengths[1]
        n_text -= n_ids + n_logps
        if n_ids > MAX_ARRAY_BYTES or n_ids % 4:
            raise _misshapen(n_ids)
        if not frames[0][3::4].isascii():
            raise WireError("an int32 frame has numbers from 0 on; one of these is negative", "numbers")
        if n_logps > MAX_ARRAY_BYTES or n_logps % 4:
            raise _misshapen(n_logps)
        highest = frames[1][3::4]
        if 0x7F in highest or 0xFF in highest:
            raise WireError("a float32 frame has finite numbers under 1.7e38; one of these is none", "numbers")
    if n_text > MAX_TEXT_BYTES:
        raise WireError(f"the text of a message is at most {MAX_TEXT_BYTES} bytes; this one has {n_text}", "size")
    if schema.has_tokens:
        _check_lengths(fields, lengths)


def _misshapen(n: int) -> WireError:
    """Of an array of so many bytes."""
    if n > MAX_ARRAY_BYTES:
        return WireError(f"an array frame is at most {MAX_ARRAY_BYTES} bytes; this one has {n}", "size")
    return WireError(f"an array frame has whole 4-byte numbers; this one has {n} bytes", "frames")


def _check_lengths(fields: Mapping[str, Any], lengths: Sequence[int]) -> None:
    """One id a token given or sampled, one log-prob and one stamped version a token sampled. Ids come first."""
    n_given = n_sampled = n_stamped = 0
    for given, sampled in fields["segments"]:
        n_given += given
        n_sampled += sampled
    for _, n in fields["spans"]:
        n_stamped += n
    if n_stamped != n_sampled or lengths[1] != 4 * n_sampled or lengths[0] != 4 * (n_given + n_sampled):
        raise WireError(
            f"segments, spans, ids and log-probs must agree: there are {n_given} + {n_sampled} tokens, "
            f"{lengths[0] // 4} ids, {lengths[1] // 4} log-probs and {n_stamped} versions",
            "frames",
        )


_shown = reprlib.Repr()
_shown.maxstring = _shown.maxother = _shown.maxlong = 60


def _show(value: Any) -> str:
    """For people; short whatever it is, and made without making much."""
    return _shown.repr(value)
