"""The push thread: which snapshots it keeps and sends, in which order, and when their memory is free again."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from actors.learner.link.weight_pusher import WeightPusher
from areal_bus import messages as m
from areal_bus.errors import PushFailed
from areal_bus.storage.journal import Journal
from areal_bus.weights import delta as deltas
from areal_bus.weights.delta import ChangeHistory, Changes
from areal_bus.weights.shared_memory import SharedMemory
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from tests.support.polling import wait_until


def snapshot_of(version: int) -> Snapshot:
    return take_snapshot(version, {"w": torch.full((3,), float(version))}, bucket_bytes=1 << 20)


def begin_of(push: int, version: int) -> m.PushBegin:
    return m.PushBegin(push, version, 0, [], "", 5.0)


def test_pushes_run_in_order_from_the_newest_two_snapshots(tmp_path: Path) -> None:
    sent: list[m.Message] = []
    failures: list[BaseException] = []

    def push(snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        if begin.push == 2:
            raise PushFailed("generator-0.0 is gone")
        return m.PushDone(begin.push, snapshot.version, snapshot.digest, 0.0, 0.0)

    pusher = WeightPusher(push, send=sent.append, failed=failures.append)
    for version in (0, 1, 2):
        assert (pusher.spare() is None) == (version < 2)
        pusher.keep(snapshot_of(version))
    for number, version in enumerate([1, 2, 2, 0]):
        pusher.begin(begin_of(number, version))
    pusher.close(10.0)
    assert [type(message).__name__ for message in sent] == ["PushDone", "PushDone", "PushBroken", "PushBroken"]
    assert sent[2] == m.PushBroken(2, 2, "generator-0.0 is gone")
    assert sent[3] == m.PushBroken(3, 0, "missing snapshot of version 0: learner 0 has [1, 2]")
    assert not failures
    journal = Journal(tmp_path, role="learner", index=0, incarnation=0)
    pusher.record(journal)
    journal.close()
    text = journal.path.read_text()
    assert text.count('"pushed"') == 2
    assert text.count('"push_broken"') == 2


def test_memory_that_is_still_compared_is_not_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    compared, go_on, order = threading.Event(), threading.Event(), list[str]()
    real = deltas.changes_between

    def changes_between(old: Snapshot, new: Snapshot) -> Changes:
        compared.set()
        assert go_on.wait(10.0)
        order.append(f"{old.version} and {new.version} are compared")
        return real(old, new)

    monkeypatch.setattr(deltas, "changes_between", changes_between)
    changes = ChangeHistory(4)
    changes.start()
    pusher = WeightPusher(lambda *_: pytest.fail("no push"), send=print, failed=print, changes=changes)
    pusher.keep(snapshot_of(0))
    pusher.keep(snapshot_of(1))
    assert compared.wait(10.0)

    def spare() -> None:
        snapshot = pusher.spare()
        order.append(f"{snapshot.version} is free")

    thread = threading.Thread(target=spare)
    thread.start()
    go_on.set()
    thread.join(10.0)
    assert order == ["0 and 1 are compared", "0 is free"]
    newest = snapshot_of(1)
    delta = changes.delta(newest, {snapshot_of(0).digest})
    assert delta is not None
    assert delta.version == 0
    pusher.close(1.0)


def slow_pusher() -> tuple[WeightPusher, threading.Event, threading.Event]:
    """One whose push sets the first event, and lasts until the second is set."""
    sending, go_on = threading.Event(), threading.Event()

    def push(snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        sending.set()
        go_on.wait(10.0)
        return m.PushDone(begin.push, snapshot.version, snapshot.digest, 0.0, 0.0)

    return WeightPusher(push, send=lambda _: None, failed=lambda _: None), sending, go_on


@pytest.mark.parametrize("place", ["cuda", "cpu"])
def test_a_snapshot_that_is_being_sent_is_not_spare_and_a_gpus_comes_back_later(place: str) -> None:
    """torch would never free it: three take turns from then on, and no fourth is made. Others are let go."""

    def made(version: int) -> Snapshot:
        snapshot = snapshot_of(version)
        if place == "cuda":
            snapshot.shared = cast(SharedMemory, SimpleNamespace(device=torch.device(place)))
        return snapshot

    pusher, sending, go_on = slow_pusher()
    first, second, third = map(made, range(3))
    pusher.keep(first)
    pusher.keep(second)
    pusher.begin(begin_of(0, 0))
    assert sending.wait(10.0)
    assert pusher.spare() is None
    pusher.keep(third)
    assert pusher.spare() is second, "the first is still being sent"
    pusher.keep(made(3))
    go_on.set()
    pusher.close(10.0)
    assert pusher.spare() is (first if place == "cuda" else third)
    pusher.keep(made(4))
    assert (pusher.spare() is third) == (place == "cuda")


def test_a_push_that_raises_anything_else_reaches_the_loop() -> None:
    def push(snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        raise KeyError("a mistake")

    failures: list[BaseException] = []
    pusher = WeightPusher(push, send=lambda _: None, failed=failures.append)
    pusher.keep(snapshot_of(0))
    pusher.begin(begin_of(0, 0))
    wait_until(lambda: [type(one) for one in failures] == [KeyError])
    pusher.close(10.0)


def test_a_push_of_a_dead_head_that_was_just_taken_ends_when_it_is_given_up() -> None:
    """Its thread had taken it and not begun it; one behind it had not been taken."""
    taken, go_on, given_up = threading.Event(), threading.Event(), list[int]()
    ended: list[m.Message] = []

    def push(snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        taken.set()
        assert go_on.wait(10.0)
        if begin.push in given_up:
            raise PushFailed(f"push {begin.push} was cancelled before it began")
        return m.PushDone(begin.push, begin.version, snapshot.digest, 0.0, 0.0)

    pusher = WeightPusher(push, send=ended.append, failed=lambda error: pytest.fail(str(error)))
    pusher.keep(snapshot_of(1))
    for number in (7, 8):
        pusher.begin(begin_of(number, 1))
    assert taken.wait(10.0)
    given_up += pusher.drop()
    assert given_up == [7]
    pusher.begin(begin_of(1_000_000, 1))
    go_on.set()
    wait_until(lambda: len(ended) == 2)
    assert [type(message) for message in ended] == [m.PushBroken, m.PushDone]
    assert pusher.drop() == []
    pusher.close(1.0)
