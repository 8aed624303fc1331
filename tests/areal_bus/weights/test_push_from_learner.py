"""The root as a learner is: with FSDP on a default world beside it, given up half-way, or dead."""

import signal
import time
from pathlib import Path

import pytest
import torch

from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import take_snapshot
from tests.areal_bus.weights.peer_process import Peer
from tests.support.polling import wait_until


def member(name: str) -> Peer:
    peer = Peer(name, "tests.areal_bus.weights.member_process", name)
    assert peer.answer() == {"up": name}
    return peer


def begin(push: int, store: str, *names: str) -> PushBegin:
    return PushBegin(push=push, version=push, view=0, members=list(names), store=store, timeout_s=120.0)


@pytest.mark.slow
def test_sharded_weights_are_pushed_while_their_ranks_train() -> None:
    world, endpoint = serve_store("127.0.0.1")
    ranks = [
        Peer(f"learner-{rank}", "tests.areal_bus.weights.learner_process", "fsdp", str(rank), endpoint)
        for rank in (0, 1)
    ]
    receiver = member("generator-0.0")
    store = ranks[0].answer()["store"]
    digests = set()
    for push in range(3):
        order = begin(push, store, receiver.name)
        for peer in (*ranks, receiver):
            peer.order(order)
        sent, received = ranks[0].answer(), receiver.answer()
        assert sent["digest"] == sent["held"] == sent["sent"] == received["digest"] == received["held"]
        assert {len(received["tensors"])} == {16}
        digests.add(sent["digest"])
    assert len(digests) == 3, "the ranks trained in between"
    assert [peer.end() for peer in (*ranks, receiver)] == [(0, "")] * 3
    assert world.num_keys() > 0


@pytest.mark.slow
def test_a_push_stuck_at_a_stopped_member_can_be_cancelled_and_the_root_ends() -> None:
    root, stopped = Peer("learner-0", "tests.areal_bus.weights.learner_process", "cancel"), member("generator-0.0")
    order = begin(1, root.answer()["store"], stopped.name)
    root.order(order)
    stopped.order(order, signal_at=[3, signal.SIGSTOP])
    wait_until_stopped(stopped)
    began = time.monotonic()
    root.say("cancel")
    assert "cancelled" in root.answer()["error"]
    assert root.end() == (0, "")
    assert time.monotonic() - began < 60, "neither the push nor the exit waits for the deadline"
    stopped.process.send_signal(signal.SIGCONT)
    assert "version 1" in stopped.answer()["error"]
    stopped.end()


@pytest.mark.slow
@pytest.mark.parametrize("route", ["gloo", "shared"])
def test_members_are_notified_of_a_dead_root_long_before_the_deadline(route: str) -> None:
    """Its shared memory goes with its last reader."""
    root = Peer("learner-0", "tests.areal_bus.weights.learner_process", "cancel", route)
    receiver = member("generator-0.0")
    order = begin(1, root.answer()["store"], receiver.name)
    root.order(order)
    receiver.order(order, signal_at=[3, signal.SIGSTOP])
    wait_until_stopped(receiver)
    assert maps_weights(receiver) == (route == "shared")
    root.process.kill()
    root.process.wait(10)
    receiver.process.send_signal(signal.SIGCONT)
    answer = receiver.answer()
    assert "version 1" in answer["error"]
    assert answer["seconds"] < 60
    wait_until(lambda: not maps_weights(receiver))
    receiver.end()
    root.end()


def maps_weights(peer: Peer) -> bool:
    return "memfd:areal-bus-weights" in Path(f"/proc/{peer.process.pid}/maps").read_text(encoding="utf-8")


def wait_until_stopped(peer: Peer) -> None:
    stat = Path(f"/proc/{peer.process.pid}/stat")
    wait_until(lambda: stat.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "T")


def test_a_push_that_was_called_off_does_not_begin() -> None:
    """The word that a member is dead may come before the push's thread has begun with it."""
    store, endpoint = serve_store("127.0.0.1")
    root = WeightSender(store, interface="lo", address="127.0.0.1")
    snapshot = take_snapshot(1, {"w": torch.ones(4)}, bucket_bytes=1 << 20)
    assert snapshot is not None
    root.cancel(1)
    with pytest.raises(PushFailed, match="push 1 was cancelled"):
        root.push(snapshot, begin(1, endpoint, "generator-0.0"))
    root.push(take_snapshot(2, {"w": torch.ones(4)}, bucket_bytes=1 << 20) or snapshot, begin(2, endpoint))
    root.close()
