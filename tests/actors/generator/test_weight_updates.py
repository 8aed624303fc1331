"""Weights in a side thread: one push at a time, and what a new term has to do with it."""

import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch

from actors.generator.weight_updates import BrokenPush, ReceivedWeights, WeightUpdates
from areal_bus.errors import PushFailed
from areal_bus.messages import PushBegin
from areal_bus.weights.delta import ChangeHistory
from areal_bus.weights.process_group import serve_store
from areal_bus.weights.receiver import WeightReceiver
from areal_bus.weights.sender import WeightSender
from areal_bus.weights.snapshot import forms_of, take_snapshot

WEIGHTS = {"weight": torch.arange(12.0).reshape(3, 4)}
WAIT_S = 30.0


def make_member() -> WeightReceiver:
    return WeightReceiver("generator-0.0", address="127.0.0.1", interface="lo")


class Side:
    """A root and the member that receives from it."""

    def __init__(self, *, gloo: bool = False, stuck_s: float = 5.0) -> None:
        self.news = threading.Event()
        store, self.store = serve_store("127.0.0.1")
        self.changes = ChangeHistory(4)
        self.root = WeightSender(
            store, interface="lo", address="127.0.0.1", route="gloo" if gloo else "auto", changes=self.changes
        )
        self.receiving = WeightUpdates(make_member, forms_of(WEIGHTS), self.news.set, stuck_s=stuck_s)

    def begin(self, push: int, *, timeout_s: float = 10.0) -> PushBegin:
        begin = PushBegin(push, push, 0, ["generator-0.0"], self.store, timeout_s)
        self.receiving.begin(begin)
        return begin

    def send(self, begin: PushBegin) -> None:
        snapshot = take_snapshot(begin.version, WEIGHTS, bucket_bytes=64)
        self.root.push(snapshot, begin)

    def outcome(self) -> ReceivedWeights | BrokenPush | None:
        """Of the push that ends next."""
        assert self.news.wait(WAIT_S)
        self.news.clear()
        return self.receiving.take()


@contextmanager
def both(*, gloo: bool = False, stuck_s: float = 5.0) -> Iterator[Side]:
    side = Side(gloo=gloo, stuck_s=stuck_s)
    try:
        yield side
    finally:
        side.receiving.close()
        side.root.close()


def test_weights_of_an_ended_term_become_the_spare_receive_buffer() -> None:
    with both() as side:
        side.send(side.begin(0))
        assert side.news.wait(WAIT_S)  # it is there, and nobody has taken it
        side.receiving.drop()
        assert side.outcome() is None
        spare = side.receiving.spare
        side.send(side.begin(1))
        received = side.outcome()
        assert isinstance(received, ReceivedWeights)
        assert received.tensors["weight"].data_ptr() == spare["weight"].data_ptr()
        assert torch.equal(received.tensors["weight"], WEIGHTS["weight"])


@pytest.mark.parametrize("n_before", [1, 2])
def test_a_push_without_a_root_ends_at_once_when_its_term_is_over(n_before: int) -> None:
    with both() as side:
        for push in range(n_before):
            side.begin(push)
        side.receiving.drop()
        begin = side.begin(n_before)
        while side.receiving.take() is None and not side.news.wait(0.01):
            pass  # the thread may not have begun when it was told to end
        side.news.clear()
        assert side.receiving.take() is None  # the old one's end is nobody's
        side.send(begin)
        received = side.outcome()
        assert isinstance(received, ReceivedWeights)
        assert (received.begin, received.receive_s < 5.0) == (begin, True)


def test_closing_ends_a_push_that_has_only_just_begun() -> None:
    with both() as side:
        for push in range(5):
            side.begin(push, timeout_s=WAIT_S)
    assert not any(thread.name == "weights" for thread in threading.enumerate())


@pytest.mark.slow
def test_a_root_that_stands_still_holds_up_no_push_of_another_one() -> None:
    """Its store takes the connection and never answers: torch waits for that without any limit."""
    with both(stuck_s=0.2) as side, socket.create_server(("127.0.0.1", 0)) as silent:
        stuck = PushBegin(0, 0, 0, ["generator-0.0"], f"127.0.0.1:{silent.getsockname()[1]}", 1.0)
        side.receiving.begin(stuck)
        first, _ = silent.accept()  # looks whether somebody listens
        second, _ = silent.accept()  # the store's own
        begin = side.begin(1)
        sending = threading.Thread(target=side.send, args=(begin,))
        sending.start()
        deadline = time.monotonic() + WAIT_S
        while (received := side.receiving.take()) is None:
            assert time.monotonic() < deadline
            side.news.wait(0.01)
        sending.join()
        assert isinstance(received, ReceivedWeights)
        assert received.begin == begin
        old = [thread for thread in threading.enumerate() if thread.name == "weights"]
        first.close()
        second.close()
        silent.close()
        for thread in old:  # now it ends, too, and nobody hears of it
            thread.join(WAIT_S)
        assert old
        assert side.receiving.take() is None


@pytest.mark.parametrize("copies", [False, True], ids=["engine-holds-the-tensors", "engine-has-its-own-copy"])
def test_a_delta_starts_from_the_version_of_the_engine(copies: bool) -> None:
    """An engine that holds the tensors keeps them, whatever comes of a push. The others' are overwritten."""
    with both(gloo=True) as side:
        weights = {"weight": torch.arange(1000).bfloat16()}
        side.receiving = WeightUpdates(make_member, forms_of(weights), side.news.set)
        snapshots = []
        for version in range(4):
            weights["weight"][version] += 1
            taken = take_snapshot(version, weights, bucket_bytes=64)
            if snapshots:
                side.changes.follow(snapshots[-1], taken)
            snapshots.append(taken)

        def pushed(version: int) -> ReceivedWeights:
            side.root.push(snapshots[version], side.begin(version))
            received = side.outcome()
            assert isinstance(received, ReceivedWeights)
            assert received.digest == snapshots[version].digest
            return received

        def swap(received: ReceivedWeights, free: Mapping[str, torch.Tensor]) -> None:
            side.receiving.swapped(received, received.tensors if copies else free)

        first = pushed(0)
        side.changes.follow(snapshots[0], snapshots[1])  # the first push by gloo has begun the history
        side.changes.follow(snapshots[1], snapshots[2])
        side.changes.follow(snapshots[2], snapshots[3])
        swap(first, {})
        second = pushed(1)
        assert second.delta_from == 0
        assert (second.tensors["weight"].data_ptr() == first.tensors["weight"].data_ptr()) == copies
        swap(second, first.tensors)
        begin = side.begin(2)
        side.root.cancel(2)
        with pytest.raises(PushFailed):
            side.root.push(snapshots[2], begin)
        assert isinstance(side.outcome(), BrokenPush)
        assert pushed(3).delta_from == (None if copies else 1)
