"""Messages that go together come apart as they were, and a bundle that breaks a rule is refused whole."""

import dataclasses
import struct
from collections.abc import Iterable, Sequence
from itertools import chain

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages
from areal_bus.errors import WireError
from areal_bus.messages import Ack, Message
from areal_bus.wire import bundle, codec
from areal_bus.wire.bundle import ALONE_BYTES, MARK, MAX_BYTES, MAX_HEADERS_BYTES, MAX_MESSAGES, Frames, join, split
from tests.areal_bus.wire.test_codec import HOSTILE, JOB, SCORED, header, of, refusal


def ack(n: int) -> Ack:
    return Ack(uid=n, sample=0, attempt=0, evaluation="")


ACK = codec.encode(ack(1), job=JOB)
ANYTHING = st.one_of([of(kind) for kind in codec.KINDS.values()])


def bundled(waiting: Sequence[Frames]) -> list[tuple[Frames, int]]:
    """All of them as they would go."""
    packets: list[tuple[Frames, int]] = []
    while waiting:
        packets.append(join(waiting))
        waiting = waiting[packets[-1][1] :]
    return packets


def by_hand(parts: Iterable[Sequence[bytes]]) -> Frames:
    """A bundle of these, whatever they are, as a stranger would make it."""
    parts = list(parts)
    frames = list(chain.from_iterable(parts))
    lengths = struct.pack(f"<{len(frames)}I", *map(len, frames))
    return [MARK, bytes(map(len, parts)), lengths, b"".join(frames)]


def encoded(several: Iterable[Message]) -> list[Frames]:
    return [codec.encode(message, job=JOB) for message in several]


def decoded(frames: Sequence[bytes]) -> list[Message]:
    return [codec.decode(part, job=JOB) for part in split(frames)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(ANYTHING, min_size=1, max_size=30))
def test_messages_that_go_together_come_as_each_alone_would(several: list[Message]) -> None:
    alone = encoded(several)
    packets = bundled(alone)
    assert [part for packet, _ in packets for part in split(packet)] == alone
    assert [message for packet, _ in packets for message in decoded(packet)] == several
    assert [n for _, n in packets] == [len(split(packet)) for packet, _ in packets]
    assert all(len(packet) <= codec.MAX_FRAMES for packet, _ in packets)


SIZES = st.sampled_from([0, 1, 100, 5_000, MAX_HEADERS_BYTES, 40_000, ALONE_BYTES, ALONE_BYTES + 1, MAX_BYTES])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.lists(SIZES, min_size=1, max_size=3), min_size=1, max_size=12), st.sampled_from([1, 40]))
def test_no_bundle_is_over_its_limits_and_none_could_take_one_more(sizes: list[list[int]], times: int) -> None:
    waiting = [[bytes(n) for n in one] for one in sizes] * times
    for packet, n in bundled(waiting):
        together, rest = waiting[:n], waiting[n:]
        assert split(packet) == together
        fits = within([*together, *rest[:1]])
        assert not (rest and fits)
        waiting = rest


def within(together: list[Frames]) -> bool:
    sizes = [sum(map(len, frames)) for frames in together]
    return (
        len(together) <= MAX_MESSAGES
        and max(sizes) <= ALONE_BYTES
        and sum(sizes) <= MAX_BYTES
        and sum(len(frames[0]) for frames in together) <= MAX_HEADERS_BYTES
    )


def test_a_share_of_64_goes_as_one() -> None:
    item = messages.ShardItem(
        step=1000, clock=999, group=15, n_groups=16, uid=16_000, sample=3, reward=1.0, correct=True, finish="stop",
        segments=[[20, 64]], spans=[[998, 20], [999, 44]], ids=b"\0" * 336, logps=b"\0" * 256, text="text " * 50,
    )  # fmt: skip
    share = [item] * 64 + [messages.ShardEnd(1000, 999, 64, 16, False)]
    (packet,) = bundled([codec.encode(message, job="a job of 48 random bits") for message in share])
    assert (len(packet[0]), packet[1]) == (bundle.N_FRAMES, 65)
    large = [b"header", bytes(ALONE_BYTES)]
    assert bundled([ACK, large, ACK, ACK, large]) == [(ACK, 1), (large, 1), (by_hand([ACK, ACK]), 2), (large, 1)]


def test_a_bundle_of_another_protocol_is_refused_as_a_mismatch() -> None:
    theirs = [msgpack.packb(msgpack.unpackb(MARK) | {"p": 99}), *by_hand([ACK, ACK])[1:]]
    with pytest.raises(WireError, match=f"protocol {messages.PROTOCOL}; the peer uses 99"):
        decoded(theirs)


def changed(at: int, frame: bytes) -> Frames:
    """A good bundle of three with another frame."""
    frames = by_hand([ACK] * 3)
    frames[at] = frame
    return frames


def sized(*sizes: int) -> bytes:
    return struct.pack(f"<{len(sizes)}I", *sizes)


N = len(ACK[0])
UNCUT = {
    "a mark and no more": ([MARK], "frames"),
    "a frame too few": (by_hand([ACK, ACK])[:3], "frames"),
    "a frame too many": ([*by_hand([ACK, ACK]), b""], "frames"),
    "no message": (by_hand([]), "size"),
    "one message": (by_hand([ACK]), "size"),
    "a message too many": (by_hand([ACK] * (MAX_MESSAGES + 1)), "size"),
    "millions of messages": ([MARK, b"\1" * (4 << 20), b"", b""], "size"),
    "a message of no frame": (changed(1, b"\1\0\2"), "frames"),
    "a last message of no frame": (changed(1, b"\1\2\0"), "frames"),
    "more frames than any record has": (by_hand([ACK, [*ACK, *[b""] * codec.MAX_FRAMES]]), "frames"),
    "fewer lengths than frames": (changed(2, sized(N, N)), "frames"),
    "more lengths than frames": (changed(2, sized(N, N, N, 0)), "frames"),
    "half a length": (changed(2, sized(N, N, N)[:-2]), "frames"),
    "lengths of more than came": (changed(2, sized(N, N, N + 1)), "frames"),
    "lengths of less than came": (changed(2, sized(N, N, N - 1)), "frames"),
    "lengths of gigabytes": (changed(2, sized(2**32 - 1, 2**32 - 1, 2**32 - 1)), "frames"),
    "too many bytes": (by_hand([[*ACK, bytes(MAX_BYTES)], ACK]), "size"),
    "too many bytes of headers": (by_hand([[header(f={"reason": "x" * MAX_HEADERS_BYTES})], ACK]), "size"),
}
CUT = {
    "lengths that cut elsewhere": (changed(2, sized(N + 1, N - 1, N)), "header"),
    "a bundle in a bundle": (by_hand([ACK, by_hand([ACK, ACK])]), "header"),
    "a mark written in another way": ([b"\xde\x00\x02" + MARK[1:], *by_hand([ACK, ACK])[1:]], "header"),
    "a message of another job": (by_hand([ACK, codec.encode(ack(1), job="other")]), "job"),
}
NO_PART = {"no frame", "a large array", "a large text", "a text that is no UTF-8"}  # over a bundle's limits by itself
PARTS = {
    f"beside good ones: {name}": (by_hand([ACK, frames, ACK]), reason)
    for name, (frames, reason) in HOSTILE.items()
    if name not in NO_PART and len(frames[0]) + 2 * N <= MAX_HEADERS_BYTES
}
ALL_BROKEN = UNCUT | CUT | PARTS


def test_the_unchanged_bundle_of_these_tests_is_accepted() -> None:
    assert decoded(by_hand([ACK, codec.encode(SCORED, job=JOB), ACK])) == [ack(1), SCORED, ack(1)]
    assert decoded(changed(2, sized(N, N, N))) == [ack(1)] * 3
    assert len(PARTS) > 30


NOTHING_SAID = header(k="Nothing")
PAIRS = messages.Partial(1, 0, 0, 0, segments=[[0, 0]] * 700, spans=[], ids=b"", logps=b"")
WIDE = dataclasses.replace(SCORED, text="\N{OLD PERSIAN SIGN A}" + "x" * 15_000)
COSTLY: dict[str, Frames] = {
    "as many messages as may be": by_hand([[b"x"]] * MAX_MESSAGES),
    "as many acks as may be": by_hand([*[ACK] * (MAX_MESSAGES - 1), [NOTHING_SAID]]),
    "headers that become 35 times as large": by_hand(
        [*[codec.encode(PAIRS, job=JOB)] * (MAX_HEADERS_BYTES // 2300), [NOTHING_SAID]]
    ),
    "texts that become 4 times as large": by_hand([*[codec.encode(WIDE, job=JOB)] * 4, [NOTHING_SAID]]),
}


@pytest.mark.parametrize("name", ALL_BROKEN | COSTLY)
def test_a_bundle_with_anything_broken_is_refused_whole_by_its_rule_at_little_cost(name: str) -> None:
    """Linear time, and 8 times its cap: all but its last message may be good, and texts are four times their bytes."""
    frames, reason = ALL_BROKEN.get(name) or (COSTLY[name], "")
    found = refusal(lambda: decoded(frames), most_s=1.0, most_bytes=8 * MAX_BYTES)  # a quadratic scan takes minutes
    assert not reason or found.reason == reason
    if name in UNCUT:  # before any message is read
        with pytest.raises(WireError):
            split(frames)


def test_only_their_last_message_is_wrong_with_the_costly_bundles() -> None:
    for name, frames in COSTLY.items():
        *good, last = split(frames)
        assert last in ([b"x"], [NOTHING_SAID])
        assert name == "as many messages as may be" or encoded(codec.decode(part, job=JOB) for part in good) == good


@settings(max_examples=200)
@given(st.binary(max_size=8), st.binary(max_size=40), st.binary(max_size=200))
def test_random_bytes_are_no_bundle(counts: bytes, lengths: bytes, joined: bytes) -> None:
    with pytest.raises(WireError):
        decoded([MARK, counts, lengths, joined])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_damaged_bundle_is_a_wire_error_or_other_messages(data: st.DataObject) -> None:
    frames = by_hand(encoded(data.draw(st.lists(ANYTHING, min_size=2, max_size=4))))
    at = data.draw(st.integers(0, len(frames) - 1))
    start = data.draw(st.integers(0, len(frames[at])))
    stop = data.draw(st.integers(start, min(start + 8, len(frames[at]))))
    frames[at] = frames[at][:start] + data.draw(st.binary(max_size=8)) + frames[at][stop:]
    try:
        sent = encoded(decoded(frames))
    except WireError:
        return
    assert encoded(decoded(by_hand(sent))) == sent
