"""The weight push over real processes: the root is here, members are `member_process.py` processes on loopback."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from areal_bus.errors import ConfigError, ImpossibleEvent, PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights import protocol
from areal_bus.weights.process_group import join_store, serve_store
from areal_bus.weights.protocol import READY, MemberReady, arrive
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.shared_memory import place_of
from areal_bus.weights.snapshot import Snapshot, forms_of, take_snapshot
from tests.areal_bus.weights.member_process import fingerprint
from tests.areal_bus.weights.peer_process import Peer
from tests.support.listening import listeners
from tests.support.polling import wait_until

BUCKET = 1 << 16
HERE = place_of(torch.device("cpu"))


class Ring:
    """One root, as many members as asked for, and numbers for pushes and views."""

    def __init__(self) -> None:
        self.store, self.endpoint = serve_store("127.0.0.1")
        self.root = WeightSender(self.store, interface="lo", address="127.0.0.1")
        self.peers: dict[str, Peer] = {}
        self.n_pushes = 0
        self.view = 0

    def members(self, *names: str) -> list[Peer]:
        new = [Peer(name, "tests.areal_bus.weights.member_process", name) for name in names if name not in self.peers]
        self.peers |= {peer.name: peer for peer in new}
        for peer in new:
            assert peer.answer() == {"up": peer.name}
        return [self.peers[name] for name in names]

    def begin(self, snapshot: Snapshot, *names: str, timeout_s: float = 60.0, view: int | None = None) -> PushBegin:
        if view is None:
            self.view += 1
        self.n_pushes += 1
        return PushBegin(
            push=self.n_pushes,
            version=snapshot.version,
            view=self.view if view is None else view,
            members=list(names),
            store=self.endpoint,
            timeout_s=timeout_s,
        )

    def push(
        self, sent: Snapshot, *peers: Peer, view: int | None = None, root: WeightSender | None = None, **order: Any
    ) -> list[dict[str, Any]]:
        """A push to these, which is complete at the root. Their answers."""
        begin = self.begin(sent, *(peer.name for peer in peers), view=view)
        for peer in peers:
            peer.order(begin, **order)
        done = (root or self.root).push(sent, begin)
        assert (done.push, done.version, done.digest) == (begin.push, sent.version, sent.digest)
        return [peer.answer() for peer in peers]

    def push_in_thread(self, sent: Snapshot, begin: PushBegin) -> tuple[threading.Thread, list[str]]:
        """The thread, and what comes of the push: "" when it is done, else why not."""
        outcome: list[str] = []

        def push() -> None:
            try:
                self.root.push(sent, begin)
                outcome.append("")
            except PushFailed as error:
                outcome.append(str(error))

        thread = threading.Thread(target=push)
        thread.start()
        return thread, outcome


def holds(answer: dict[str, Any], sent: Snapshot) -> bool:
    """The bits of the root, tensor by tensor."""
    expected = {name: fingerprint(tensor) for name, tensor in weights(sent.version).items() if name != "lm_head"}
    return answer["tensors"] == expected and answer["digest"] == answer["held"] == sent.digest


@pytest.fixture(scope="module")
def ring() -> Iterator[Ring]:
    torch.set_num_threads(1)
    ring = Ring()
    yield ring
    ring.root.close()
    ends = {name: peer.end() for name, peer in ring.peers.items()}
    killed = {name for name, (code, _) in ends.items() if code == -9}
    assert {end for name, end in ends.items() if name not in killed} <= {(0, "")}, "members end without a word"


def weights(seed: int = 0) -> dict[str, torch.Tensor]:
    """fp32 and bf16, a scalar, an empty and a strided tensor, one larger than several buckets, one tied pair."""
    torch.manual_seed(seed)
    head = torch.randn(211, 317)
    return {
        "embedding": head,
        "norm": torch.randn(317).bfloat16(),
        "projection": torch.randn(64, 129).bfloat16(),
        "scale": torch.tensor(0.1 + seed),
        "empty": torch.empty(0, 5),
        "turned": torch.randn(31, 77).t(),
        "every_other": torch.randn(100)[::2],
        "steps": torch.arange(seed, seed + 7),
        "lm_head": head,
    }


def snapshot(version: int, seed: int | None = None, bucket_bytes: int = BUCKET) -> Snapshot:
    taken = take_snapshot(version, weights(version if seed is None else seed), bucket_bytes=bucket_bytes)
    assert taken is not None
    return taken


def test_members_hold_the_roots_bits_and_the_next_push_reuses_group_and_memory(ring: Ring) -> None:
    peers = ring.members("generator-0.0", "generator-1.0")
    for version in (1, 2, 3):
        sent = snapshot(version)
        for answer in ring.push(sent, *peers, view=100, reuse=version == 3):
            assert holds(answer, sent)
            assert answer["reused"] == (version == 3)
    assert ring.store.add("groups", 0) == 1, "three pushes of one view share one group"


def test_a_catch_up_push_of_another_view_leaves_the_rings_group_alone(ring: Ring) -> None:
    peers = ring.members("generator-0.0", "generator-1.0")
    sent, groups = snapshot(4), []
    for view, part in ((200, peers), (201, peers[1:]), (200, peers)):
        assert {answer["digest"] for answer in ring.push(sent, *part, view=view)} == {sent.digest}
        groups.append(ring.store.add("groups", 0))
    assert groups == [groups[0], groups[0] + 1, groups[0] + 1]


@pytest.mark.slow
def test_members_of_a_tree_relay_the_roots_bits(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two members at most: generator-0 relays to the last two. A wrong byte is found by each that got it."""
    monkeypatch.setattr(protocol, "FAN_OUT", 2)
    peers = ring.members(*(f"generator-{index}.0" for index in range(4)))
    n_before = ring.store.add("groups", 0)
    for version, flips in ((31, False), (32, True), (33, False), (34, False)):
        sent = snapshot(version)
        if flips:
            sent.tensors()["projection"].view(torch.uint8)[3, 5] ^= 4
        for answer in ring.push(sent, *peers, view=500, fan_out=2):
            if flips:
                assert "1 of 8 tensors of version 32, first projection" in answer["error"]
            else:
                assert holds(answer, sent)
    assert ring.store.add("groups", 0) == n_before + 2, "after wrong bytes the tree is built again, and then kept"


@pytest.mark.slow
@pytest.mark.parametrize(("place", "fan_out"), [(3, 32), (0, 2)])
def test_a_member_killed_in_mid_push_fails_it_at_once_and_a_new_view_of_the_survivors_works(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, place: int, fan_out: int
) -> None:
    """The last of one group; with groups of two the one that relays to the last two members."""
    monkeypatch.setattr(protocol, "FAN_OUT", fan_out)
    survivors = ring.members("generator-0.0", "generator-1.0", "generator-2.0")
    (dying,) = ring.members(f"generator-{place + 3}.{fan_out}")
    names = [peer.name for peer in survivors]
    names.insert(place, dying.name)  # gloo sends along a tree: the place decides who notices
    sent = take_snapshot(5, {"w": torch.randn(8 << 20)}, bucket_bytes=1 << 20)
    assert sent is not None
    begin = ring.begin(sent, *names, timeout_s=120)
    for peer in survivors:
        peer.order(begin, fan_out=fan_out)
    dying.order(begin, signal_at=[3, signal.SIGKILL], fan_out=fan_out)
    began = time.monotonic()
    with pytest.raises(PushFailed, match="version 5"):
        ring.root.push(sent, begin)
    for peer in survivors:
        assert "version 5" in peer.answer()["error"]
    assert time.monotonic() - began < 60, "long before the deadline"
    assert dying.process.wait(10) == -9

    assert {answer["held"] for answer in ring.push(sent, *survivors, fan_out=fan_out)} == {sent.digest}


@pytest.mark.slow
def test_a_relay_that_stands_still_costs_a_push_until_its_deadline(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others are stopped by the root then, those below the relay too."""
    monkeypatch.setattr(protocol, "FAN_OUT", 2)
    (still, *others) = ring.members(*(f"generator-{index}.0" for index in range(4)))
    sent = take_snapshot(35, {"w": torch.randn(8 << 20)}, bucket_bytes=1 << 20)
    assert sent is not None
    begin = ring.begin(sent, still.name, *(peer.name for peer in others), timeout_s=5.0)
    for peer in others:
        peer.order(replace(begin, timeout_s=60.0), fan_out=2)
    still.order(begin, signal_at=[3, signal.SIGSTOP], fan_out=2)
    with pytest.raises(PushFailed, match="is not complete after 5 s"):
        ring.root.push(sent, begin)
    began = time.monotonic()
    assert all("aborted" in peer.answer()["error"] for peer in others)
    assert time.monotonic() - began < 10, "long before their own deadline"
    still.process.send_signal(signal.SIGCONT)
    assert "version 35" in still.answer()["error"]


def test_a_member_that_never_comes_is_named_at_the_deadline(ring: Ring) -> None:
    (peer,) = ring.members("generator-0.0")
    sent = snapshot(6)
    begin = ring.begin(sent, peer.name, "generator-9.0", timeout_s=1.0)
    peer.order(replace(begin, timeout_s=30.0))  # it began first, and must not be the first to give up
    with pytest.raises(PushFailed, match=r"not complete after 1 s.*generator-9\.0"):
        ring.root.push(sent, begin)
    assert "version 6" in peer.answer()["error"]


def test_another_model_is_refused_with_the_first_difference(ring: Ring) -> None:
    (peer,) = ring.members("generator-0.0")
    sent = snapshot(9)
    expect = forms_of(sent.tensors()) | {"norm": ((318,), "bfloat16")}
    begin = ring.begin(sent, peer.name)
    peer.order(begin, expect=expect)
    sentence = r"norm is bfloat16 \[318\] here and bfloat16 \[317\] in the push"
    with pytest.raises(PushFailed, match=rf"generator-0\.0: .*{sentence}"):
        ring.root.push(sent, begin)
    assert "norm is bfloat16 [318] here" in peer.answer()["error"]


def test_cancel_ends_a_push_that_waits(ring: Ring) -> None:
    sent = snapshot(10)
    thread, outcome = ring.push_in_thread(sent, ring.begin(sent, "generator-9.0"))
    wait_until(lambda: sent.n_users == 1)
    with pytest.raises(ImpossibleEvent, match="version 10 is being pushed"):
        take_snapshot(11, weights(), previous=sent, bucket_bytes=BUCKET)
    ring.root.cancel()
    thread.join(10)
    assert not thread.is_alive()
    assert "cancelled" in outcome[0]
    assert sent.n_users == 0


def test_a_push_sends_the_version_that_was_announced(ring: Ring) -> None:
    sent = snapshot(13)
    begin = ring.begin(snapshot(14), "generator-0.0")
    with pytest.raises(PushFailed, match="version 14, snapshot 13"):
        ring.root.push(sent, begin)


def test_a_member_without_a_store_to_join_reports_it() -> None:
    member = WeightReceiver("generator-0.0", address="127.0.0.1", interface="lo")
    begin = PushBegin(push=0, version=0, view=0, members=["generator-0.0"], store="127.0.0.1:1", timeout_s=1.0)
    with pytest.raises(PushFailed, match="cannot reach the store of learner 0"):
        member.receive(begin)


@pytest.mark.parametrize("address", ["0.0.0.0", "*", "", "localhost", "::"])
def test_the_store_refuses_an_endpoint_other_than_one_numeric_address(address: str) -> None:
    with pytest.raises(ConfigError):
        serve_store(address)


def test_store_and_groups_listen_on_the_named_address_only(ring: Ring) -> None:
    (peer,) = ring.members("generator-0.0")
    client = join_store(ring.endpoint, 5)
    client.set("hello", "there")
    assert ring.store.get("hello") == b"there"
    ring.push(snapshot(15), peer)
    for process, n_least in ((os.getpid(), 2), (peer.process.pid, 1)):  # gloo, and the store here
        heard = listeners([process])
        assert len(heard) >= n_least
        assert {one.address for one in heard} == {"127.0.0.1"}
    assert int(ring.endpoint.rpartition(":")[2]) in {one.port for one in listeners([os.getpid()])}


def test_a_push_whose_member_died_before_the_members_met_is_called_off_at_once(ring: Ring) -> None:
    """Gloo itself would wait for the dead one until the deadline, at the root and at every other member."""
    (peer,) = ring.members("generator-0.0")
    sent = snapshot(9)
    begin = ring.begin(sent, peer.name, "generator-8.0")
    arrive(ring.store, begin, READY, MemberReady("generator-8.0", "", HERE, os.getpid()).encode())
    peer.order(begin)
    thread, outcome = ring.push_in_thread(sent, begin)
    wait_until(lambda: ring.store.check([f"push/{begin.push}/go"]))
    began = time.monotonic()
    ring.root.cancel(begin.push)
    thread.join(30.0)
    answer = peer.answer()
    assert time.monotonic() - began < begin.timeout_s
    assert "was cancelled here; it waited for the members to build a group" in outcome[0]
    assert "was aborted" in str(answer["error"])
    assert ring.push(sent, peer)[0]["digest"] == sent.digest


def test_a_push_that_was_called_off_does_not_begin(ring: Ring) -> None:
    """The word that a member is dead may come before the push's thread has begun with it."""
    (peer,) = ring.members("generator-0.0")
    sent = snapshot(11)
    begin = ring.begin(sent, "generator-9.0")
    ring.root.cancel(begin.push)
    with pytest.raises(PushFailed, match=f"push {begin.push} was cancelled"):
        ring.root.push(sent, begin)
    assert ring.push(sent, peer)[0]["digest"] == sent.digest
