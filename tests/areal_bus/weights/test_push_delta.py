"""Deltas over gloo, to members in processes of their own (test_push.py has the pushes of all bytes)."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch

from areal_bus.weights import protocol
from areal_bus.weights.delta import ChangeHistory
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from tests.areal_bus.weights.peer_process import Peer
from tests.areal_bus.weights.test_push import BUCKET, Ring, weights

DEPTH = 2
SEEDS = count()  # no two roots have the same weights
NAMES = tuple(f"generator-{index}.0" for index in range(3))


class DeltaRing(Ring):
    """A root that follows its snapshots, and versions that differ by a few numbers."""

    def begin_anew(self) -> None:
        """Another root at the same store. It does not know what members hold of the last one."""
        self.root.close()
        self.history = ChangeHistory(DEPTH)
        self.root = WeightSender(self.store, interface="lo", address="127.0.0.1", route="gloo", changes=self.history)
        self.tensors = weights(next(SEEDS))
        self.newest: Snapshot | None = None
        self.version = 0

    def update(self) -> Snapshot:
        """The next version: a column of the largest tensor and one number of each other one changed."""
        self.tensors["embedding"][:, 5] += 1
        for tensor in self.tensors.values():
            if tensor.numel():
                tensor[(0,) * tensor.dim()] += 1
        taken = take_snapshot(self.version, self.tensors, bucket_bytes=BUCKET)
        assert taken is not None
        if self.newest is not None:
            self.history.follow(self.newest, taken)
        self.newest, self.version = taken, self.version + 1
        return taken

    def push_newest(self, *peers: Peer, **order: object) -> tuple[int | None, int, list[dict[str, Any]]]:
        """What the root says that it sent, and what the members answer."""
        sent = self.newest
        assert sent is not None
        begin = self.begin(sent, *(peer.name for peer in peers))
        for peer in peers:
            peer.order(begin, prints=False, swaps=True, **order)
        done = self.root.push(sent, begin)
        return done.delta_from, done.sent_bytes, [peer.answer() for peer in peers]


@pytest.fixture(scope="module")
def one_store() -> Iterator[DeltaRing]:
    torch.set_num_threads(1)
    ring = DeltaRing()
    yield ring
    ring.root.close()
    for peer in ring.peers.values():
        code, said = peer.end()
        assert code == -9 or (code, said) == (0, "")


@pytest.fixture
def ring(one_store: DeltaRing) -> DeltaRing:
    one_store.begin_anew()
    return one_store


@pytest.mark.slow
@pytest.mark.parametrize("reuse", [False, True], ids=["engine-holds-the-tensors", "engine-has-its-own-copy"])
def test_members_get_the_delta_from_the_oldest_version_among_them(ring: DeltaRing, reuse: bool) -> None:
    one, other = ring.members(*NAMES[:2])
    full = ring.update()
    how = {"reuse": reuse}
    start, n_bytes, answers = ring.push_newest(one, other, **how)
    assert (start, n_bytes) == (None, full.n_bytes)
    assert [(answer["held"], answer["delta_from"], answer["sent_bytes"]) for answer in answers] == [
        (full.digest, None, full.n_bytes)
    ] * 2
    for missed in (False, True):  # the second time, the other one misses a version
        sent = ring.update()
        peers = [one] if missed else [one, other]
        start, n_bytes, answers = ring.push_newest(*peers, **how)
        assert start == sent.version - 1
        assert n_bytes < full.n_bytes / 20
        assert [(answer["held"], answer["delta_from"]) for answer in answers] == [(sent.digest, start)] * len(peers)
    sent = ring.update()
    start, more_bytes, answers = ring.push_newest(one, other, **how)
    assert start == sent.version - 2
    assert n_bytes <= more_bytes < full.n_bytes / 20
    assert [(answer["held"], answer["delta_from"]) for answer in answers] == [
        (sent.digest, sent.version - 1),
        (sent.digest, sent.version - 2),
    ]


@pytest.mark.parametrize("reuse", [False, True])
def test_damaged_weights_are_found_and_the_next_push_sends_all_bytes(ring: DeltaRing, reuse: bool) -> None:
    """The other member is not disturbed."""
    damaged, well = ring.members(*NAMES[:2])
    ring.update()
    ring.push_newest(damaged, well)
    sent = ring.update()
    begin = ring.begin(sent, damaged.name, well.name)
    damaged.order(begin, swaps=True, reuse=reuse, spoils=True)
    well.order(begin, swaps=True)
    assert ring.root.push(sent, begin).delta_from == 0
    assert well.answer()["held"] == sent.digest
    error = damaged.answer()["error"]
    assert "1 of 8 tensors of version 1, first embedding, by a delta from version 0" in error
    start, n_bytes, (answer,) = ring.push_newest(damaged)
    assert (start, n_bytes, answer["held"]) == (None, sent.n_bytes, sent.digest)
    sent = ring.update()
    start, _, answers = ring.push_newest(damaged, well)
    assert start == 1
    assert [answer["held"] for answer in answers] == [sent.digest] * 2


def test_members_of_a_tree_relay_a_delta(ring: DeltaRing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "FAN_OUT", 2)
    peers = ring.members(*NAMES)
    for version in range(3):
        sent = ring.update()
        start, _, answers = ring.push_newest(*peers, fan_out=2)
        assert start == (version - 1 if version else None)
        assert [answer["held"] for answer in answers] == [sent.digest] * 3
