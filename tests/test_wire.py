"""Every record goes over the wire whole, and nothing else gets in."""

import dataclasses
import tracemalloc
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages, wire
from areal_bus.errors import WireError

JOB = "job"
INTS = st.integers(-(2**63), 2**63 - 1)
VALUES = {
    int: INTS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    list[str]: st.lists(st.text(max_size=5), max_size=4),
    list[int]: st.lists(INTS, max_size=4),
    list[list[int]]: st.lists(st.lists(INTS, max_size=3), max_size=3),
    dict[str, float]: st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    bool | None: st.none() | st.booleans(),
    int | None: st.none() | INTS,
}
FRAMES = {"text": st.text(), "int32": st.integers(0, 9).map(lambda n: b"abcd" * n), "float32": st.just(b"\0" * 8)}


def of(kind: type) -> st.SearchStrategy[typing.Any]:
    hints = typing.get_type_hints(kind)
    fields = {
        f.name: FRAMES[f.metadata["frame"]] if "frame" in f.metadata else VALUES[hints[f.name]]
        for f in dataclasses.fields(kind)
    }
    return st.builds(kind, **fields)


@settings(max_examples=300)
@given(st.one_of([of(kind) for kind in wire.KINDS.values()]))
def test_every_record_survives_the_wire(message: messages.Message) -> None:
    assert wire.decode(wire.encode(message, job=JOB), job=JOB) == message


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_random_bytes_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        wire.decode(frames, job=JOB)


def header(**changes: typing.Any) -> bytes:
    """A header of a Stop with some parts changed."""
    parts = {"p": messages.PROTOCOL, "j": JOB, "k": "Stop", "f": {"reason": "x"}, "n": []} | changes
    return typing.cast(bytes, msgpack.packb(parts))


def test_the_unchanged_header_of_these_tests_is_accepted() -> None:
    assert wire.decode([header()], job=JOB) == messages.Stop("x")


def deep(n: int) -> list[typing.Any]:
    value: list[typing.Any] = []
    for _ in range(n):
        value = [value]
    return value


HOSTILE = {
    "another protocol": [header(p=99)],
    "another job": [header(j="other")],
    "an unknown kind": [header(k="Evil")],
    "a private name as kind": [header(k="__class__")],
    "a missing field": [header(f={})],
    "a further field": [header(f={"reason": "x", "more": 1})],
    "a wrong type": [header(f={"reason": 3})],
    "a number that is a bool": [header(k="BatchRequest", f={"step": True})],
    "a frame too many": [header(), b"x"],
    "a declared frame that is not there": [header(n=[4])],
    "depth": [header(f={"reason": deep(400)})],
    "a list as header": [msgpack.packb([1, 2])],
    "a header key twice": [b"\x82\xa1p\x01\xa1p\x01"],
    "an ext type": [header(f={"reason": msgpack.ExtType(5, b"x")})],
    "bytes after the header": [header() + b"\0"],
    "an integer over 64 bits": [header(k="BatchRequest", f={"step": 2**64 - 1})],
    "a large header": [header(f={"reason": "x" * wire.MAX_HEADER_BYTES})],
    "a pickle": [b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01."],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_headers_are_refused(name: str) -> None:
    with pytest.raises(WireError):
        wire.decode(HOSTILE[name], job=JOB)


def test_an_array_of_odd_length_is_refused() -> None:
    trajectory = messages.Prompt(uid=0, attempt=0, born=0, samples=[0], evaluation="", row="{}")
    frames = wire.encode(trajectory, job=JOB)
    with pytest.raises(WireError, match="UTF-8"):
        wire.decode([frames[0], b"\xff\xfe"], job=JOB)


def test_an_odd_array_is_refused() -> None:
    item = messages.ShardItem(
        step=0, clock=0, group=0, n_groups=1, uid=0, sample=0, reward=0.0, correct=None, finish="stop", segments=[],
        spans=[], ids=b"abc", logps=b"", text="",
    )  # fmt: skip
    with pytest.raises(WireError, match="4-byte"):
        wire.decode(wire.encode(item, job=JOB), job=JOB)


def test_an_oversize_header_is_never_sent() -> None:
    with pytest.raises(WireError, match="at most"):
        wire.encode(messages.Stop("x" * 70_000), job=JOB)


def test_a_megabyte_of_empty_lists_costs_no_memory() -> None:
    bomb = [b"\xdd\x00\x0f\xff\xff" + b"\x90" * ((1 << 20) - 1)]
    tracemalloc.start()
    with pytest.raises(WireError):
        wire.decode(bomb, job=JOB)
    assert tracemalloc.get_traced_memory()[1] < 2 * wire.MAX_HEADER_BYTES
    tracemalloc.stop()


def test_a_trajectory_costs_about_eight_bytes_a_token() -> None:
    n = 1000
    t = messages.Trajectory(
        uid=1, sample=0, attempt=0, evaluation="", generator="generator-0.0", finish="stop", segments=[[0, n]],
        spans=[[3, n]], seconds=1.0, ids=b"\0" * 4 * n, logps=b"\0" * 4 * n, prompt_text="", text="", row="",
    )  # fmt: skip
    assert sum(map(len, wire.encode(t, job=JOB))) / n < 8.5
