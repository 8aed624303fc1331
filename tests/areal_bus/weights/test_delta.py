"""Deltas without a network: positions, payloads, the history of the root, and what a member makes of them."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from areal_bus.weights import delta as deltas
from areal_bus.weights.delta import BaseWeights, ChangeHistory, Delta, decode_positions, encode_positions
from areal_bus.weights.receiver import DeltaBuffers, ReceiveBuffers
from areal_bus.weights.snapshot import Snapshot, digest_of, take_snapshot

CPU = torch.device("cpu")
BUCKET = 1 << 10
DEPTH = 3


def weights() -> dict[str, Tensor]:
    """Several dtypes, an odd count of bytes, a scalar, an empty tensor, and one of several blocks."""
    torch.manual_seed(0)
    return {
        "wide": torch.randn(40, 25).bfloat16(),
        "flags": torch.arange(13, dtype=torch.uint8),
        "scale": torch.tensor(0.5),
        "empty": torch.empty(0, 3),
        "exact": torch.randn(30),
        "steps": torch.arange(5),
    }


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "BLOCK", 300)


def taken(version: int, tensors: dict[str, Tensor], previous: Snapshot | None = None) -> Snapshot:
    snapshot = take_snapshot(version, tensors, bucket_bytes=BUCKET, previous=previous)
    assert snapshot is not None
    return snapshot


def change(tensors: dict[str, Tensor], dice: random.Random, share: float) -> None:
    """Flip bits of this share of the numbers."""
    for tensor in tensors.values():
        raw = tensor.view(-1).view(torch.uint8).numpy()
        for at in range(len(raw)):
            if dice.random() < share / 2:
                raw[at] ^= dice.randrange(1, 256)


@given(st.data())
def test_positions_survive_their_encoding(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 5000))
    positions = np.array(sorted(data.draw(st.sets(st.integers(0, n - 1), max_size=60))), dtype=np.int64)
    raw = encode_positions(positions, n)
    assert len(raw) <= min(-(-n // 8), len(positions) + n // 255)  # a bit a number, or a byte or so a position
    assert decode_positions(raw, len(positions), n).tolist() == positions.tolist()


@given(st.binary(max_size=40), st.integers(0, 50), st.integers(1, 200))
def test_no_bytes_decode_to_a_position_outside_the_block(raw: bytes, n_changed: int, n_numbers: int) -> None:
    try:
        positions = decode_positions(np.frombuffer(raw, dtype=np.uint8), n_changed, n_numbers)
    except ValueError:
        return
    assert len(positions) == n_changed
    assert all(0 <= position < n_numbers for position in positions)


@dataclass
class Member:
    """What a generator does with its weights. `copies`: its engine keeps the tensors, as a server's process does."""

    copies: bool
    live: BaseWeights | None = None
    spare: dict[str, Tensor] | None = None
    rejected: str = ""

    @property
    def held(self) -> str:
        return "" if self.live is None or self.live.digest == self.rejected else self.live.digest

    def receive(self, snapshot: Snapshot, delta: Delta | None, spoil: Callable[[Tensor], object]) -> bool:
        """Take the full bytes, or the delta. Whether it holds the version now."""
        base, into = self.live, self.spare
        if self.copies:
            self.live = None
        self.spare = None
        buffers = ReceiveBuffers(snapshot.layout, into, CPU)
        if delta is None:
            landing: ReceiveBuffers | DeltaBuffers = buffers
            data = snapshot.data.clone()
        else:
            assert base is not None
            landing, data = DeltaBuffers(len(delta.payload), base, snapshot.layout, buffers), delta.payload.clone()
        spoil(data)
        for start in range(0, len(data), BUCKET):
            landing.write(start, data[start : start + BUCKET])
        landing.finish()
        if landing.wrong:
            self.rejected = "" if delta is None or base is None else base.digest
            return False
        self.spare = buffers.tensors if self.copies else None if base is None else dict(base.tensors)
        self.live = BaseWeights(snapshot.version, snapshot.digest, buffers.tensors)
        return True


@dataclass
class Root:
    """A learner that keeps two snapshots, as the weight pusher does."""

    tensors: dict[str, Tensor]
    history: ChangeHistory = field(default_factory=lambda: ChangeHistory(DEPTH))
    kept: list[Snapshot] = field(default_factory=list)
    version: int = 0

    def __post_init__(self) -> None:
        self.history.start()
        self.kept = [taken(0, self.tensors)]

    def update(self, dice: random.Random, share: float) -> None:
        change(self.tensors, dice, share)
        self.version += 1
        self.history.settle()
        new = taken(self.version, self.tensors, self.kept.pop(0) if len(self.kept) > 1 else None)
        self.history.follow(self.kept[-1], new)
        self.kept.append(new)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("update"), st.sampled_from([0.0, 0.001, 0.02, 0.9])),
        st.tuples(st.just("push"), st.sets(st.integers(0, 2), min_size=1)),
        st.tuples(st.just("push"), st.sets(st.integers(0, 2), min_size=1)),
        st.tuples(st.just("wrong bytes"), st.integers(0, 2)),
        st.tuples(st.just("wrong base"), st.integers(0, 2)),
        st.tuples(st.just("death"), st.integers(0, 2)),
        st.tuples(st.just("term"), st.just(0)),
    ),
    min_size=10,  # a member receives into what it held before at its third push
    max_size=30,
)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.integers(0, 2**31))
def test_a_member_holds_the_roots_bits_or_those_of_an_older_version(
    operations: list[tuple[str, object]], seed: int
) -> None:
    dice = random.Random(seed)
    root = Root(weights())
    members = [Member(False), Member(False), Member(True)]
    for what, argument in operations:
        if what == "update":
            assert isinstance(argument, float)
            root.update(dice, argument)
        elif what == "term":  # another process, with the same weights
            root = Root(root.tensors, version=root.version)
        elif what == "death":
            assert isinstance(argument, int)
            members[argument] = Member(argument == 2)
        elif what == "wrong base":
            assert isinstance(argument, int)
            if (live := members[argument].live) is not None:
                live.tensors["wide"].view(torch.uint8)[0, 0] ^= 1
        else:
            chosen = argument if isinstance(argument, set) else {argument}
            push(root, [members[i] for i in sorted(chosen)], dice, flips=what == "wrong bytes")
    for member in members:  # the last push is one of its own, as for a member that missed others
        for _ in range(2):
            push(root, [member], dice, flips=False)
        assert member.live is not None
        assert digest_of(dict(member.live.tensors)) == root.kept[-1].digest


def push(root: Root, members: list[Member], dice: random.Random, *, flips: bool) -> None:
    """The newest version. Each member holds the right weights, or got wrong bytes and reports them."""
    snapshot = root.kept[-1]
    delta = root.history.delta(snapshot, {member.held for member in members})
    for member in members:

        def spoil(data: Tensor) -> None:
            if flips and len(data):
                data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)

        before = member.live
        bits = None if before is None else digest_of(dict(before.tensors))
        is_damaged = before is not None and bits != before.digest
        if member.receive(snapshot, delta, spoil):
            assert member.live is not None
            assert digest_of(dict(member.live.tensors)) == snapshot.digest
        else:
            assert flips or (delta is not None and is_damaged), "only wrong bytes make a push fail"
            assert member.copies or member.live is before, "a failed push leaves the live weights alone"
        if before is not None and not member.copies:
            assert digest_of(dict(before.tensors)) == bits


@pytest.fixture
def root() -> Root:
    return Root(weights())


def updated(root: Root, *shares: float) -> list[str]:
    """The digests of all versions."""
    dice, digests = random.Random(1), [root.kept[-1].digest]
    for share in shares:
        root.update(dice, share)
        digests.append(root.kept[-1].digest)
    return digests


S = 0.005  # a small share


@pytest.mark.parametrize(
    ("shares", "pushed", "held", "n_bases"),
    [
        ([0.01, 0.01, 0.01], -1, [2, 1], 3),  # from the oldest version that a member holds
        ([0.01], -1, [1], 1),  # it holds the version: no values
        ([0.01], -1, [], None),
        ([0.01], -1, ["another"], None),
        ([0.01], -1, ["", 1], None),
        ([S] * (DEPTH + 1), -1, [0], None),  # further behind than the depth
        ([S] * (DEPTH + 1), -1, [1], DEPTH + 1),
        ([0.01, 0.9, 0.01], -1, [1], None),  # a large change ends the chain, and the next one begins another
        ([0.01, 0.9, 0.01], -1, [2], 2),
        ([0.01, 0.01], 0, [0], 2),  # the version before the newest
        ([0.01, 0.01], 0, [2], None),  # a delta never leads to an older version
        ([0.0, 0.0], -1, [0], 1),  # a digest that occurs twice is one state
        ([], 0, [0], 1),  # a new learner: as after a restart from a checkpoint
        ([], 0, [0, "another"], None),
    ],
)
def test_a_delta_starts_from_the_oldest_version_that_a_member_holds_or_there_is_none(
    root: Root, shares: list[float], pushed: int, held: list[int | str], n_bases: int | None
) -> None:
    digests = updated(root, *shares)
    snapshot = root.kept[pushed]
    named = {digests[one] if isinstance(one, int) else one for one in held}
    delta = root.history.delta(snapshot, named)
    assert (None if delta is None else len(delta.bases)) == n_bases
    if delta is not None:
        last = len(digests) + pushed if pushed < 0 else len(digests) - 2 if shares else 0
        assert delta.bases == tuple(digests[last + 1 - len(delta.bases) : last + 1])
        assert root.history.delta(snapshot, named) is delta, "late members often need the same one"
        if delta.bases == (snapshot.digest,):
            assert len(delta.payload) == 8 * len(deltas.blocks(snapshot.layout.entries))


def test_nothing_is_compared_before_a_push_needs_it() -> None:
    root = Root(weights(), history=(history := ChangeHistory(DEPTH)))
    history._is_on = False
    digests = updated(root, 0.01)
    assert history.delta(root.kept[-1], {digests[0]}) is None
    history.start()
    assert history.delta(root.kept[-1], {digests[0]}) is None
    root.update(random.Random(2), 0.01)
    assert history.delta(root.kept[-1], {digests[1]}) is not None


def test_a_layout_that_changes_is_an_error(root: Root) -> None:
    other = taken(1, weights() | {"scale": torch.zeros(2)})
    root.history.follow(root.kept[-1], other)
    with pytest.raises(ValueError, match="one layout"):
        root.history.settle()


def test_a_payload_of_another_layout_is_refused(root: Root) -> None:
    digests = updated(root, 0.01)
    delta = root.history.delta(root.kept[-1], {digests[0]})
    assert delta is not None
    for payload in (delta.payload[:-1], delta.payload[:3], torch.cat([delta.payload, delta.payload[:1]])):
        base = BaseWeights(0, digests[0], weights())
        buffers = ReceiveBuffers(root.kept[-1].layout, None, CPU)
        landing = DeltaBuffers(len(payload), base, root.kept[-1].layout, buffers)
        landing.write(0, payload)
        landing.finish()
        assert len(landing.wrong) == 6
