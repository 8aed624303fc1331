"""Every record goes over the wire whole, and nothing else gets in."""

import dataclasses
import json
import time
import tracemalloc
import typing

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages, sample_fields
from areal_bus.errors import WireError
from areal_bus.wire import codec, schema
from areal_bus.wire.header import MAX_OBJECT_BYTES, check_cost, unpack_checked

JOB = "job"
INTS = st.integers(-(2**63), 2**63 - 1)
Values = dict[typing.Any, st.SearchStrategy[typing.Any]]  # by declared type
VALUES: Values = {
    int: INTS,
    float: st.floats(allow_nan=False, allow_infinity=False),
    str: st.text(max_size=20),
    bool: st.booleans(),
    list[str]: st.lists(st.text(max_size=5), max_size=4),
    list[int]: st.lists(INTS, max_size=4),
    list[float]: st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=4),
    list[list[int]]: st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(list), max_size=3),
    dict[str, float]: st.dictionaries(st.text(max_size=5), st.floats(allow_nan=False), max_size=3),
    bool | None: st.none() | st.booleans(),
    int | None: st.none() | INTS,
}
TEXTS = st.text()  # without lone surrogates: those are replaced
TURNS = st.lists(st.lists(TEXTS, min_size=2, max_size=2), min_size=1, max_size=3)
FRAMES: dict[str, st.SearchStrategy[typing.Any]] = {
    "text": TEXTS,
    "names": st.lists(st.text(min_size=1, max_size=8).filter(lambda name: "\n" not in name), max_size=4),
    "int32": st.integers(0, 9).map(lambda n: b"abcd" * n),
    "float32": st.just(b"\0" * 8),
    "fields": st.just(b"") | st.lists(st.sampled_from(["a", "b", "c_1"]), min_size=1, unique=True).map(" ".join),
    "turns": st.just("") | TURNS.map(json.dumps) | TURNS.map(lambda turns: json.dumps(turns, ensure_ascii=False)),
}


def of(kind: type, values: Values = VALUES) -> st.SearchStrategy[typing.Any]:
    """Records of that kind that may be sent."""
    hints = typing.get_type_hints(kind)
    fields = {
        f.name: FRAMES["turns" if f.name == "turns" else f.metadata["frame"]]
        if "frame" in f.metadata
        else value_of(f"{kind.__name__}.{f.name}", hints[f.name], values)
        for f in dataclasses.fields(kind)
    }
    built = st.builds(kind, **fields)
    return built.map(whole) if {"segments", "ids"} <= hints.keys() else built


def value_of(field: str, hint: type, values: Values) -> st.SearchStrategy[typing.Any]:
    return st.sampled_from(list(schema.ENUMS[field])).map(str) if field in schema.ENUMS else values[hint]


def whole(record: typing.Any) -> typing.Any:
    """With as many ids, log-probs and versions as its segments say."""
    n_given, n_sampled = sum(g for g, _ in record.segments), sum(s for _, s in record.segments)
    logps = b"\0\1\2\3" * n_sampled
    further = {}
    if getattr(record, "fields", b""):
        further["fields"] = sample_fields.packed(dict.fromkeys(record.fields.split(" "), logps))
    return dataclasses.replace(
        record, spans=[[3, n_sampled]], ids=b"abcd" * (n_given + n_sampled), logps=logps, **further
    )


@settings(max_examples=300)
@given(st.one_of([of(kind) for kind in codec.KINDS.values()]))
def test_every_record_survives_the_wire(message: messages.Message) -> None:
    assert codec.decode(codec.encode(message, job=JOB), job=JOB) == message


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=4))
def test_random_bytes_are_a_wire_error(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        codec.decode(frames, job=JOB)


@settings(max_examples=100)
@given(st.data())
def test_a_damaged_message_is_a_wire_error_or_another_message(data: st.DataObject) -> None:
    frames = list(codec.encode(data.draw(st.one_of([of(kind) for kind in codec.KINDS.values()])), job=JOB))
    at = data.draw(st.integers(0, len(frames) - 1))
    start = data.draw(st.integers(0, len(frames[at])))
    stop = data.draw(st.integers(start, min(start + 8, len(frames[at]))))
    frames[at] = frames[at][:start] + data.draw(st.binary(max_size=8)) + frames[at][stop:]
    try:
        sent = codec.encode(codec.decode(frames, job=JOB), job=JOB)
    except WireError:
        return
    assert codec.encode(codec.decode(sent, job=JOB), job=JOB) == sent


def header(**changes: typing.Any) -> bytes:
    """A header of a Stop with some parts changed."""
    parts = {"p": messages.PROTOCOL, "j": JOB, "k": "Stop", "f": {"reason": "x"}, "n": []} | changes
    return typing.cast(bytes, msgpack.packb(parts))


SCORED = messages.Scored(
    status="value", reward=1.0, correct=None, error="", score_s=0.1, uid=0, sample=0, attempt=0, evaluation="",
    generator="generator-0.0", finish="stop", segments=[[1, 2]], spans=[[0, 2]], seconds=1.0, term=0,
    ids=b"\1\0\0\0" * 3, logps=b"\0\0\0\xbf" * 2, prompt_text="p", text="t",
)  # fmt: skip


def scored(frames: dict[int, bytes] | None = None, **fields: typing.Any) -> list[bytes]:
    """The frames of a Scored with some header fields or whole frames changed, as a stranger would make them."""
    whole_one = codec.encode(SCORED, job=JOB)
    raw = [frame if (frames or {}).get(at) is None else (frames or {})[at] for at, frame in enumerate(whole_one)]
    parts = msgpack.unpackb(raw[0])
    parts["f"] |= fields
    parts["n"] = [len(frame) for frame in raw[1:]]
    return [msgpack.packb(parts), *raw[1:]]


ONE_FIELD = b"certainty\n" + b"\0\0\0\xbf" * 2


@pytest.mark.parametrize(
    ("frame", "said"),
    [
        (ONE_FIELD + b"\0" * 4, "mismatch of fields: 1 of them"),
        (b"certainty\n", "mismatch of fields"),
        (b"a b\n" + b"\0" * 8, "mismatch of fields: 2 of them"),
        (b"certainty" + b"\0" * 8, "mismatch of fields"),
        (b" " * (1 << 20), "mismatch of fields"),
        (b"certainty\n" + b"\0\0\xc0\x7f" * 2, "finite numbers"),
        (b"a" * codec.MAX_ARRAY_BYTES + ONE_FIELD, "mismatch of fields"),
    ],
)
def test_fields_that_do_not_fit_their_sample_are_refused(frame: bytes, said: str) -> None:
    at = len(scored()) - 1  # the last frame
    assert codec.decode(scored({at: ONE_FIELD}), job=JOB) == dataclasses.replace(SCORED, fields=ONE_FIELD)
    with pytest.raises(WireError, match=said):
        codec.decode(scored({at: frame}), job=JOB)


def test_the_unchanged_messages_of_these_tests_are_accepted() -> None:
    assert codec.decode([header()], job=JOB) == messages.Stop("x")
    assert codec.decode(scored(), job=JOB) == SCORED


def deep(n: int) -> list[typing.Any]:
    value: list[typing.Any] = []
    for _ in range(n):
        value = [value]
    return value


NAN, INF = float("nan"), float("inf")
JOIN = {"name": "x-0.0", "role": "generator", "index": 0, "incarnation": 0, "endpoint": "", "pid": 1, "host": "",
        "again": 0, "split": 0}  # fmt: skip
BEAT = {"progress": 0, "version": None, "note": "", "hears": True}
HOSTILE = {
    "no frame": ([], "frames"),
    "an empty frame": ([b""], "header"),
    "another protocol": ([header(p=99)], "protocol"),
    "another protocol with another header": ([msgpack.packb({"p": 99, "more": 1})], "protocol"),
    "another job": ([header(j="other")], "job"),
    "an unknown kind": ([header(k="Evil")], "kind"),
    "what only a bus says": ([header(k="Disconnected", f={})], "kind"),
    "a private name as kind": ([header(k="__class__")], "kind"),
    "a missing field": ([header(f={})], "fields"),
    "a further field": ([header(f={"reason": "x", "more": 1})], "fields"),
    "a wrong type": ([header(f={"reason": 3})], "fields"),
    "a number that is a bool": ([header(k="BatchRequest", f={"step": True})], "fields"),
    "a protocol that is a bool": ([header(p=True)], "header"),
    "a frame too many": ([header(), b"x"], "frames"),
    "a declared frame that is not there": ([header(n=[4])], "frames"),
    "lengths that are no list": ([header(n=0)], "frames"),
    "depth": ([header(f={"reason": deep(400)})], "depth"),
    "more depth than bytes allow": ([b"\x91" * 60_000], "depth"),
    "arrays that say they are long, in each other": ([b"\xdc\xff\xff" * 1000], "size"),
    "64 KiB of empty lists": ([b"\xdd\x00\x00\xff\xf0" + b"\x90" * 0xFFF0], "size"),
    "64 KiB of empty maps": ([b"\xdd\x00\x00\xff\xf0" + b"\x80" * 0xFFF0], "size"),
    "64 KiB of numbers": ([b"\xdd\x00\x00\xff\xf0" + b"\xe0" * 0xFFF0], "size"),
    "a list as header": ([msgpack.packb([1, 2])], "header"),
    "a header key twice": ([b"\x82\xa1p\x01\xa1p\x01"], "header"),
    "an ext type": ([header(f={"reason": msgpack.ExtType(5, b"x")})], "header"),
    "a large ext type": ([header(f={"reason": msgpack.ExtType(5, b"x" * 60_000)})], "ext"),
    "bytes for text": ([header(f={"reason": b"x"})], "header"),
    "bytes after the header": ([header() + b"\0"], "header"),
    "a truncated header": ([header()[:-1]], "header"),
    "text that is no UTF-8": ([header(f={"reason": "xx"}).replace(b"xx", b"\xff\xfe")], "header"),
    "an integer over 64 bits": ([header(k="BatchRequest", f={"step": 2**64 - 1})], "fields"),
    "names that are not there": ([header(k="PeerList", f={"life": 0}, n=[1])], "frames"),
    "names without text": ([header(k="PeerList", f={"life": 0}, n=[2, 0]), b"\n\n", b""], "fields"),
    "a name that is long": ([header(k="PeerList", f={"life": 0}, n=[256, 0]), b"x" * 256, b""], "fields"),
    "more names than members": ([header(k="PeerList", f={"life": 0}, n=[1 << 20, 0]), b"x\n" * (1 << 19), b""], "size"),
    "turns that are no JSON": (scored({5: b"<script>"}), "text"),
    "turns that are cut off": (scored({5: b'[["a","b"],["c"'}), "text"),
    "turns of three": (scored({5: b'[["a","b","c"]]'}), "text"),
    "turns of numbers": (scored({5: b"[[1,2]]"}), "text"),
    "open lists as turns": (scored({5: b"[" * 40_000}), "text"),
    "turns and an open one": (scored({5: b'[["",""]' + b',["",""]' * 5000}), "text"),
    "more turns than a sample has": (scored({5: b'[["",""]' + b',["",""]' * messages.MAX_PAIRS + b"]"}), "text"),
    "quotes as turns": (scored({5: b'[["' + b'\\"' * 20_000}), "text"),
    "many segments": (scored(segments=[[0, 0]] * (messages.MAX_PAIRS + 1)), "fields"),
    "a long sentence": ([header(f={"reason": "x" * 2001})], "fields"),
    "a long endpoint": ([header(k="Join", f=JOIN | {"endpoint": "x" * 256})], "fields"),
    "a long note": ([header(k="Heartbeat", f=BEAT | {"note": "x" * 201})], "fields"),
    "a megabyte of empty lists": ([b"\xdd\x00\x0f\xff\xff" + b"\x90" * ((1 << 20) - 1)], "size"),
    "a large header": ([header(f={"reason": "x" * codec.MAX_HEADER_BYTES})], "size"),
    "a pickle": ([b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00K\x01."], "header"),
    "a reward that is no number": (scored(reward=NAN), "fields"),
    "an infinite reward": (scored(reward=-INF), "fields"),
    "a status of its own": (scored(status="pass"), "fields"),
    "a role of its own": ([header(k="Join", f=JOIN | {"role": "x"})], "fields"),
    "negative counts": (scored(segments=[[1, -2]]), "fields"),
    "segments of three": (scored(segments=[[1, 1, 1]]), "fields"),
    "fewer ids than tokens": (scored({1: b"\1\0\0\0"}), "frames"),
    "more log-probs than tokens": (scored({2: b"\0" * 12}), "frames"),
    "versions of other tokens": (scored(spans=[[0, 3]]), "frames"),
    "segments without end": (scored(segments=[[2**62, 2**62]] * 9), "frames"),
    "half a number": (scored({1: b"\0" * 13}), "frames"),
    "a negative token": (scored({1: b"\1\0\0\xff" * 3}), "numbers"),
    "a log-prob that is no number": (scored({2: b"\0\0\xc0\x7f" * 2}), "numbers"),
    "an infinite log-prob": (scored({2: b"\0\0\x80\xff" * 2}), "numbers"),
    "a large array": (scored({1: b"\0" * (codec.MAX_ARRAY_BYTES + 4)}), "size"),
    "a large text": (scored({4: b"x" * (codec.MAX_TEXT_BYTES + 1)}), "size"),
    "a text that is no UTF-8": (scored({4: b"x" * (codec.MAX_TEXT_BYTES - 2) + b"\xff"}), "text"),
}


def refusal(decode: typing.Callable[[], object], *, most_s: float, most_bytes: int) -> WireError:
    """The error, which costs little time and memory."""
    spent, refused = [], []
    for traced in (False, False, False, True):
        if traced:
            tracemalloc.start()
        began = time.thread_time()
        with pytest.raises(WireError) as caught:
            decode()
        spent.append(time.thread_time() - began)
        refused.append(caught.value)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert min(spent[:3]) < most_s
    assert peak < most_bytes
    assert len(str(refused[0])) < 400
    return refused[0]


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_frames_are_refused_by_their_rule_at_little_cost(name: str) -> None:
    """50 ms, and twice the cap of what carries it: a header's, or a frame's."""
    frames, reason = HOSTILE[name]
    is_large = sum(map(len, frames)) > 2 * codec.MAX_HEADER_BYTES
    cap = codec.MAX_FRAME_BYTES if is_large else max(codec.MAX_HEADER_BYTES, MAX_OBJECT_BYTES)
    found = refusal(lambda: codec.decode(frames, job=JOB), most_s=0.05, most_bytes=2 * cap)
    assert found.reason == reason
    if name == "another protocol":
        assert f"protocol {messages.PROTOCOL}; the peer uses 99" in str(found)


@pytest.mark.parametrize(
    "change",
    [{"reward": NAN}, {"seconds": INF}, {"status": "pass"}, {"spans": [[0, 1]]}, {"ids": b""},
     {"logps": b"\0\0\xc0\x7f" * 2}, {"text": "x" * (codec.MAX_TEXT_BYTES + 1)}, {"lease": "x" * 201},
     {"generator": "x" * 70_000}, {"segments": [[0, 0]] * messages.MAX_PAIRS + [[1, 2]]}, {"turns": "no JSON"},
     {"uid": 2**64}],
)  # fmt: skip
def test_the_encoder_refuses_messages_that_the_decoder_would_refuse(change: dict[str, typing.Any]) -> None:
    with pytest.raises(WireError):
        codec.encode(dataclasses.replace(SCORED, **change), job=JOB)


ATOMS = st.none() | st.booleans() | INTS | st.floats() | st.text(max_size=40)
VALUES_OF_ANY_KIND = st.recursive(
    ATOMS, lambda inner: st.lists(inner, max_size=30) | st.dictionaries(st.text(max_size=4), inner, max_size=8)
)


@settings(max_examples=40, deadline=None)
@given(VALUES_OF_ANY_KIND, st.integers(1, 300))
def test_the_estimated_cost_of_a_header_is_at_least_its_decoded_size(value: typing.Any, times: int) -> None:
    packed = typing.cast(bytes, msgpack.packb({"v": [value] * times}))
    tracemalloc.start()
    try:
        unpack_checked(packed, check_cost(packed))
    except WireError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MAX_OBJECT_BYTES + 4096


def test_a_long_sentence_is_cut_by_its_sender() -> None:
    sent = codec.decode(codec.encode(messages.Stop("\u4e00" * 70_000), job=JOB), job=JOB)
    assert sent == messages.Stop("\u4e00" * 1997 + "...")


def test_half_a_pair_is_replaced_in_headers_and_frames() -> None:
    sent = dataclasses.replace(SCORED, status="error", error="bad \ud83d", text="\udc00 \U0001f600")
    read = codec.decode(codec.encode(sent, job=JOB), job=JOB)
    assert read == dataclasses.replace(sent, error="bad \ufffd", text="\ufffd \U0001f600")


LARGE: dict[typing.Any, typing.Any] = {
    int: 2**63 - 1,
    float: 1.5,
    bool: True,
    bool | None: True,
    int | None: 2**63 - 1,
    list[int]: [2**31] * 4096,
    list[float]: [1.5] * 2048,
    dict[str, float]: {f"reward:{n}": 1.0 for n in range(1000)},
}


@pytest.mark.parametrize("body", [b"[", b'["', b'["","', b'\\"', b"\\\\", b'["",""],'])
def test_turns_of_the_largest_size_are_judged_in_linear_time_and_memory(body: bytes) -> None:
    frames = scored({5: b'[["' + body * ((codec.MAX_TEXT_BYTES - 10) // len(body))})
    found = refusal(lambda: codec.decode(frames, job=JOB), most_s=1.0, most_bytes=3 * codec.MAX_TEXT_BYTES)
    assert "turns" in str(found)  # a quadratic scan takes minutes


def at_its_limits(kind: type) -> typing.Any:
    """A record with each field as large as it may be."""
    hints, limits = typing.get_type_hints(kind), dict(schema.schema_of(kind).longest)
    pairs, n_tokens = [[0, 0]] * (messages.MAX_PAIRS - 1), codec.MAX_ARRAY_BYTES // 4
    values: dict[str, typing.Any] = {}
    for field in dataclasses.fields(kind):
        key, hint = f"{kind.__name__}.{field.name}", hints[field.name]
        if key in schema.ENUMS:
            values[field.name] = max(map(str, schema.ENUMS[key]), key=len)
        elif field.name in limits:
            ascii_only = field.name == "parts"  # printable names and numbers
            values[field.name] = ("x" if ascii_only else "\U0001f600") * limits[field.name].n
        elif hint == list[list[int]]:
            own = [0, n_tokens] if field.name == "segments" else [2**31, n_tokens]
            values[field.name] = [*([[2**31, 0]] * len(pairs) if field.name == "spans" else pairs), own]
        elif hint == list[str]:
            values[field.name] = [f"tcp://{n:0249d}" for n in range(messages.MAX_NAMES)]
        elif field.metadata.get("frame") in ("int32", "float32"):
            values[field.name] = bytes(codec.MAX_ARRAY_BYTES)
        elif field.metadata.get("frame") == "text":
            values[field.name] = ""
        elif field.metadata.get("frame") == "fields":  # an array of this many tokens, with its name, is over the limit
            values[field.name] = b""
        else:
            values[field.name] = LARGE[hint]
    return kind(**values)


@pytest.mark.parametrize("kind", codec.KINDS.values())
def test_a_message_with_each_field_at_its_limit_can_be_sent(kind: type) -> None:
    message = at_its_limits(kind)
    assert codec.decode(codec.encode(message, job="x" * 64), job="x" * 64) == message


def test_a_trajectory_costs_about_eight_bytes_a_token() -> None:
    n = 1000
    t = messages.Trajectory(
        uid=1, sample=0, attempt=0, evaluation="", generator="generator-0.0", finish="stop", segments=[[0, n]],
        spans=[[3, n]], seconds=1.0, term=0, ids=b"\0" * 4 * n, logps=b"\0" * 4 * n, prompt_text="", text="", row="",
    )  # fmt: skip
    assert sum(map(len, codec.encode(t, job=JOB))) / n < 8.5
