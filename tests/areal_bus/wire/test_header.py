"""A header as we make it is judged at a glance, others value by value: the same ones are refused, and alike."""

import dataclasses
import typing
from datetime import UTC, datetime

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages
from areal_bus.errors import WireError
from areal_bus.wire import codec, schema
from tests.areal_bus.wire.test_codec import HOSTILE, INF, JOB, NAN, deep, of

ANYTHING = st.one_of([of(kind) for kind in codec.KINDS.values()])
Pairs = list[tuple[typing.Any, typing.Any]]
UNUSUAL = {"UpdateDone"}  # a map in a field: not for a glance


class Raw(bytes):
    """Packed already."""


def packed(value: typing.Any) -> bytes:
    if isinstance(value, Raw):
        return value
    if isinstance(value, list):
        return msgpack.Packer().pack_array_header(len(value)) + b"".join(map(packed, value))
    return typing.cast(bytes, msgpack.packb(value, datetime=True))


def packed_map(pairs: Pairs, *, wide: bool = False) -> Raw:
    """In this order, keys that come twice included; `wide` as nobody would who is brief."""
    head = b"\xde" + len(pairs).to_bytes(2, "big") if wide else msgpack.Packer().pack_map_header(len(pairs))
    return Raw(head + b"".join(packed(key) + packed(value) for key, value in pairs))


def outcome(frames: list[bytes]) -> tuple[typing.Any, ...]:
    try:
        message = codec.decode(frames, job=JOB)
    except WireError as refused:
        return refused.reason, str(refused)
    return type(message), repr(message)  # NaN is no NaN's equal, and 1 is True's


def by_value(frames: list[bytes]) -> tuple[typing.Any, ...]:
    """The outcome where nothing is judged at a glance."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec, "_read_fast", lambda packed, job, lengths: None)
        return outcome(frames)


TWICE = packed_map([("a", 1), ("a", 1)])
ODD = st.sampled_from(
    [
        True, False, None, 0, 1, -1, 2**32, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 0.0, 1.5, -0.0, NAN, INF, -INF,
        "", "stop", "Stop", "value", "generator", "xyz", b"", b"x", [], [1], [True], [2**63], ["a"], [None], [[]],
        [[1, 2]], [[1, True]], [[1.0, 2]], [[1, 2, 3]], [[-1, 2]], [[2**63, 0]], [[2**63 - 1, 2**63 - 1]], [[[1, 2]]],
        {}, {"a": 1.0}, {"a": True}, {"a": {"a": 1}}, [{"a": 1}], deep(9), TWICE, [TWICE], [[TWICE, 1]],
        msgpack.ExtType(5, b"x"), datetime(2020, 1, 1, tzinfo=UTC),
        Raw(b"\xcf" + bytes(7) + b"\1"), Raw(b"\xd3" + bytes(8)), Raw(b"\xca\x7f\x80\0\0"), Raw(b"\xca\0\0\x80\x3f"),
        Raw(b"\xd9\x04stop"), Raw(b"\xa1\xff"), Raw(b"\xc1"), Raw(b"\xdd\0\0\0\1\1"), Raw(b""),
    ]
)  # fmt: skip
NAMES = st.sampled_from(["uid", "term", "reason", "x", "", "p", "n", "f", 1, b"uid", Raw(b"\xd9\x03uid"), None])


def changed(data: st.DataObject, pairs: Pairs) -> Pairs:
    """A few entries are others, elsewhere, twice, gone or new."""
    pairs = list(pairs)
    for _ in range(data.draw(st.sampled_from([0, 0, 0, 1, 1, 2, 4]))):
        at = data.draw(st.integers(0, max(0, len(pairs) - 1)))
        way = data.draw(
            st.sampled_from(["value", "value", "value", "swap", "drop", "again", "in place", "new", "name"])
        )
        if way == "new" or not pairs:
            pairs.insert(at, (data.draw(NAMES), data.draw(ODD)))
        elif way == "value":
            pairs[at] = pairs[at][0], data.draw(ODD)
        elif way == "name":
            pairs[at] = data.draw(NAMES), pairs[at][1]
        elif way == "swap":
            pairs[at - 1], pairs[at] = pairs[at], pairs[at - 1]
        elif way == "drop":
            del pairs[at]
        elif way == "again":
            pairs.insert(data.draw(st.integers(0, len(pairs))), pairs[at])
        else:  # as many entries as there should be, one of them twice
            pairs[at] = pairs[at - 1]
    return pairs


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(ANYTHING, st.data())
def test_the_fast_decoder_equals_the_checking_decoder(message: messages.Message, data: st.DataObject) -> None:
    header, *raw = codec.encode(message, job=JOB)
    parts = msgpack.unpackb(header)
    wide = data.draw(st.sampled_from([False] * 9 + [True]))
    parts["f"] = packed_map(changed(data, list(parts["f"].items())), wide=wide)
    lengths = parts["n"]
    if lengths and data.draw(st.booleans()):
        lengths[data.draw(st.integers(0, len(lengths) - 1))] = data.draw(ODD)
    outer = changed(data, list(parts.items())) if data.draw(st.sampled_from([True, False, False])) else [*parts.items()]
    made = packed_map(outer) + data.draw(st.sampled_from([b""] * 9 + [b"\0"]))
    frames = [made, *raw[: data.draw(st.sampled_from([len(raw)] * 9 + [0, 1]))]]
    assert outcome(frames) == by_value(frames)


@settings(max_examples=200, deadline=None)
@given(ANYTHING, st.data())
def test_damaged_bytes_are_seen_alike(message: messages.Message, data: st.DataObject) -> None:
    header, *raw = codec.encode(message, job=JOB)
    start = data.draw(st.integers(0, len(header)))
    stop = data.draw(st.integers(start, min(start + 4, len(header))))
    frames = [header[:start] + data.draw(st.binary(max_size=4)) + header[stop:], *raw]
    assert outcome(frames) == by_value(frames)


@pytest.mark.parametrize("name", HOSTILE)
def test_fast_and_checking_decoder_agree_on_hostile_frames(name: str) -> None:
    frames, _ = HOSTILE[name]
    assert outcome(frames) == by_value(frames)


@settings(max_examples=300)
@given(st.one_of([of(kind) for name, kind in codec.KINDS.items() if name not in UNUSUAL]))
def test_the_fast_decoder_accepts_every_encoded_message(message: messages.Message) -> None:
    header, *raw = codec.encode(message, job=JOB)
    assert codec._read_fast(header, JOB, list(map(len, raw))) is not None


def test_a_key_twice_deep_inside_is_refused() -> None:
    fields = packed_map([("version", 1), ("stats", TWICE), ("digest", "")])
    said = {"p": messages.PROTOCOL, "j": JOB, "k": "UpdateDone", "f": fields, "n": []}
    assert outcome([packed_map(list(said.items()))]) == ("header", "duplicate key in a header")


def test_a_job_of_any_name_is_decoded() -> None:
    for job in ("", "áf", "ϊ", "x" * 300):
        assert codec.decode(codec.encode(messages.Stop("x"), job=job), job=job) == messages.Stop("x")
        with pytest.raises(WireError, match="only messages of job"):
            codec.decode(codec.encode(messages.Stop("x"), job=job), job=job + "f")


@dataclasses.dataclass
class Torn:
    prompt_text: str = messages.frame("text")
    uid: int
    text: str = messages.frame("text")


@dataclasses.dataclass
class Loose:
    uid: int
    ids: bytes = messages.frame("int32")


@pytest.mark.parametrize("kind", [Torn, Loose])
def test_a_record_whose_frames_nothing_measures_has_no_schema(kind: type) -> None:
    with pytest.raises(TypeError, match="not so in"):
        schema.schema_of(kind)
