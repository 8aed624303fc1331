"""Batches as they come over the bus, the inbox and the push thread, within one process."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from actors.learner.batching import build
from actors.learner.link.inbox import LearnerInbox, StopRun
from actors.learner.link.rollout import HeadFailover, Rollout
from actors.learner.link.weight_pusher import WeightPusher
from actors.learner.loop import find_loop, train
from actors.runtime import process as codes
from actors.runtime.context import HeartbeatState
from areal_bus import messages as m
from areal_bus.errors import ConfigError, ImpossibleEvent, PushFailed, Restart
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus
from areal_bus.weights import delta as deltas
from areal_bus.weights.delta import ChangeHistory, Changes
from areal_bus.weights.shared_memory import SharedMemory
from areal_bus.weights.snapshot import Snapshot, take_snapshot
from tests.support.learner_setup import random_shard
from tests.support.polling import wait_until


@dataclass
class Line:
    """A learner's end and the head's end of one connection."""

    head: Bus
    inbox: LearnerInbox
    rollout: Rollout
    begun: list[m.PushBegin]
    version: list[int]  # of the actor
    said: list[tuple[int, bool]]  # life of each head that was told where this learner is; whether it had outlived one
    ended: list[int]  # exit codes with which the process would have been ended

    def train(self) -> None:
        self.version[0] += 1

    def tell(self, *messages: m.Message) -> None:
        for message in messages:
            self.head.send("learner-0.0", message)

    def hand_out(self, step: int, *, n_items: int | None = None, last: bool = False) -> None:
        shard = [replace(item, step=step) for item in random_shard(step, clock=step)]
        self.tell(*shard, m.ShardEnd(step, step, len(shard) if n_items is None else n_items, 3, last))


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    head = Bus("head", job="test", listen=f"ipc://{tmp_path}/head")
    bus = Bus("learner-0.0", job="test")
    bus.connect("head", head.endpoint)
    bus.send("head", m.Ready(0))
    assert head.receive(10.0) is not None  # the head has heard it, so it can answer
    begun: list[m.PushBegin] = []
    ended: list[int] = []
    inbox = LearnerInbox(bus, push_begun=begun.append, overdue=ended.append, rejoin_grace_s=0.05)
    journal = Journal(tmp_path, role="learner", index=0, incarnation=0)
    version = [0]
    head.send("learner-0.0", m.PeerList([], []))
    said: list[tuple[int, bool]] = []
    failover = HeadFailover(
        inbox,
        lambda message: bus.send("head", message),
        most=list,
        begin=lambda life, lives_on: said.append((life, lives_on)),
    )
    assert not failover.confirm(False)
    rollout = Rollout(
        failover,
        build=partial(build, eta=1, n_samples=4),
        journal=journal,
        heartbeat=HeartbeatState(),
        version=lambda: version[0],
    )
    yield Line(head, inbox, rollout, begun, version, said, ended)
    inbox.close()
    bus.close()
    head.close()
    journal.close()


def test_batches_come_in_order_until_there_are_none(line: Line) -> None:
    line.hand_out(0)
    line.hand_out(1)
    line.tell(m.NoBatch(2, False))
    batches = []
    for batch in line.rollout:
        batches.append(batch)
        line.train()
    assert [(b.step, b.clock, len(b.items), b.n_groups) for b in batches] == [(0, 0, 12, 3), (1, 1, 12, 3)]
    assert line.rollout.ended
    requests = [line.head.receive(10.0) for _ in range(3)]
    assert [r[1] for r in requests if r] == [m.BatchRequest(0), m.BatchRequest(1), m.BatchRequest(2)]


def test_the_last_share_is_not_followed_by_a_request(line: Line) -> None:
    line.hand_out(0, last=True)
    assert line.rollout.prepare_batch() is not None
    line.train()
    assert line.rollout.prepare_batch() is None
    assert line.head.receive(10.0) == ("learner-0.0", m.BatchRequest(0))
    assert line.head.receive(0) is None


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_that_is_not_trained_is_the_last_one_asked_for(line: Line, last: bool) -> None:
    line.hand_out(0, last=last)
    assert line.rollout.prepare_batch() is not None
    with pytest.raises(ConfigError, match=r"untrained batch: .* the batch of step 0 and did not train it"):
        line.rollout.prepare_batch()
    assert line.head.receive(10.0) == ("learner-0.0", m.BatchRequest(0))
    assert line.head.receive(0) is None


def test_the_end_of_a_share_wakes_the_loop_and_its_items_do_not(line: Line) -> None:
    *items, end = [*random_shard(0, clock=0), m.ShardEnd(0, 0, 12, 3, False)]
    line.tell(m.HeadHeartbeat(term=1, version=0))
    wait_until(lambda: line.inbox.term == 1)  # what came before it is sorted
    line.inbox.take_now()  # the directory, where it was known to the failover before it lay there
    line.inbox.wait(0)
    line.tell(*items, m.HeadHeartbeat(term=2, version=0))
    wait_until(lambda: line.inbox.term == 2)
    assert not line.inbox._changed.is_set()
    line.tell(end)
    wait_until(line.inbox._changed.is_set)
    assert [line.inbox.take() for _ in range(13)] == [*items, end]


def test_a_share_that_is_not_whole_is_refused(line: Line) -> None:
    line.hand_out(0, n_items=13)
    with pytest.raises(ImpossibleEvent, match="announced 13 items, 12 came"):
        line.rollout.prepare_batch()


def test_a_batch_of_another_step_is_refused(line: Line) -> None:
    line.hand_out(1)
    with pytest.raises(ImpossibleEvent, match="waited for step 0, got step 1"):
        line.rollout.prepare_batch()


def test_stop_ends_a_wait(line: Line) -> None:
    threading.Thread(target=lambda: line.tell(m.Stop("enough"))).start()
    with pytest.raises(StopRun, match="enough"):
        line.rollout.prepare_batch()
    with pytest.raises(StopRun):
        line.inbox.check()


def test_a_drained_run_ends_the_loop_and_logs_it(line: Line) -> None:
    line.tell(m.NoBatch(0, True))
    assert line.rollout.prepare_batch() is None
    assert (line.rollout.ended, line.rollout.drained) == (True, True)


def test_a_rejoin_ends_a_bound_learner_whose_loop_is_stuck(line: Line) -> None:
    line.inbox.bind()
    line.tell(m.Rejoin("only a member may speak"))
    wait_until(lambda: line.ended == [codes.RESTART])
    with pytest.raises(Restart, match="only a member may speak"):
        line.rollout.prepare_batch()


def test_a_rejoin_before_that_only_asks_for_another_join(line: Line) -> None:
    line.tell(m.Rejoin("only a member may speak"))
    wait_until(line.inbox.asked_to_rejoin)
    assert not line.inbox.asked_to_rejoin()
    line.inbox.bind()
    line.inbox.check()
    assert not line.ended


@pytest.mark.parametrize("later", [3, 5])
def test_the_term_is_taken_from_pushes_and_not_from_later_heartbeats(line: Line, later: int) -> None:
    line.tell(
        m.HeadHeartbeat(3, 10),
        m.PushBegin(0, 10, 0, [], "", 5.0, term=4),
        m.HeadHeartbeat(later, 10),
        m.NoBatch(0, False),
    )
    assert line.rollout.prepare_batch() is None
    assert line.inbox.term == 4


def test_before_its_first_push_a_learner_takes_the_term_from_heartbeats(line: Line) -> None:
    line.tell(m.HeadHeartbeat(3, 10), m.HeadHeartbeat(4, 10), m.NoBatch(0, False))
    assert line.rollout.prepare_batch() is None
    assert line.inbox.term == 4


def test_a_push_begins_while_the_inbox_is_not_read(line: Line) -> None:
    begin = m.PushBegin(0, 1, 0, ["generator-0.0"], "127.0.0.1:1", 5.0)
    line.tell(begin, m.NoBatch(0, False))
    assert line.rollout.prepare_batch() is None  # read after the push, by the same thread
    assert line.begun == [begin]


def test_an_exception_of_another_thread_is_raised_by_the_loop(line: Line) -> None:
    line.inbox.fail(OSError("disk is gone"))
    with pytest.raises(OSError, match="disk is gone"):
        line.inbox.take()


def snapshot_of(version: int) -> Snapshot:
    made = take_snapshot(version, {"w": torch.full((3,), float(version))}, bucket_bytes=1 << 20)
    assert made is not None
    return made


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
    assert sent[3] == m.PushBroken(3, 0, "version 0 is not kept; kept are [1, 2]")
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
        assert snapshot is not None
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


def test_a_snapshot_that_is_being_sent_is_never_spare() -> None:
    pusher, sending, go_on = slow_pusher()
    for version in (0, 1):
        pusher.keep(snapshot_of(version))
    pusher.begin(begin_of(0, 0))
    assert sending.wait(10.0)
    assert pusher.spare() is None
    go_on.set()
    pusher.close(10.0)


def test_a_gpus_snapshot_that_was_being_sent_comes_back_later() -> None:
    """torch would never free it: three take turns from then on, and no fourth is made."""

    def on_gpu(version: int) -> Snapshot:
        snapshot = snapshot_of(version)
        snapshot.shared = cast(SharedMemory, SimpleNamespace(device=torch.device("cuda")))
        return snapshot

    pusher, sending, go_on = slow_pusher()
    first, second, third = map(on_gpu, range(3))
    pusher.keep(first)
    pusher.keep(second)
    pusher.begin(begin_of(0, 0))
    assert sending.wait(10.0)
    assert pusher.spare() is None
    pusher.keep(third)
    assert pusher.spare() is second, "the first is still being sent"
    pusher.keep(on_gpu(3))
    go_on.set()
    pusher.close(10.0)
    assert pusher.spare() is first
    pusher.keep(on_gpu(4))
    assert pusher.spare() is third


def test_a_push_that_raises_anything_else_reaches_the_loop() -> None:
    heard, failures = threading.Event(), []

    def push(snapshot: Snapshot, begin: m.PushBegin) -> m.PushDone:
        raise KeyError("a mistake")

    def failed(error: BaseException) -> None:
        failures.append(error)
        heard.set()

    pusher = WeightPusher(push, send=lambda _: None, failed=failed)
    pusher.keep(snapshot_of(0))
    pusher.begin(begin_of(0, 0))
    assert heard.wait(10.0)
    assert isinstance(failures[0], KeyError)
    pusher.close(10.0)


def test_the_default_loop_is_ours() -> None:
    assert find_loop("ppo") is train


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("loop_a:train", "raise KeyError('x')", "must import: 'loop_a' does not .KeyError: 'x'."),
        ("loop_b:train", "trian = 1", "missing function 'train' in module 'loop_b' .learner.loop."),
        ("loop_c", "", "unknown learner.loop"),
        ("loop_missing:train", None, "No module named 'loop_missing'"),
    ],
)
def test_a_loop_that_cannot_be_found_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str | None, said: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    if text is not None:
        (tmp_path / f"{name.partition(':')[0]}.py").write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_loop(name)


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
        pusher.begin(m.PushBegin(number, 1, 0, [], "", 5.0))
    assert taken.wait(10.0)
    given_up += pusher.drop()
    assert given_up == [7]
    pusher.begin(m.PushBegin(1_000_000, 1, 0, [], "", 5.0))
    go_on.set()
    wait_until(lambda: len(ended) == 2)
    assert [type(message) for message in ended] == [m.PushBroken, m.PushDone]
    assert pusher.drop() == []
    pusher.close(1.0)
