"""A learner outlives its head: what becomes of a batch that was being handed out, and of whom the ranks ask next."""

import array
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from actors.learner.batching import Batch, build
from actors.learner.link.inbox import LearnerInbox, StopRun
from actors.learner.link.rollout import HeadFailover, Rollout
from actors.runtime import process as codes
from actors.runtime.context import HeartbeatState
from areal_bus import messages as m
from areal_bus.errors import Restart
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus
from tests.support.learner_script import Script, script
from tests.support.learner_setup import random_shard
from tests.support.polling import wait_until

CROWDS = pytest.mark.parametrize("size", [1, 2, 3])
Result = TypeVar("Result")
WAIT_S = 20.0


class Agreement:
    """The largest of each value over ranks that are threads: a collective, as of gloo."""

    def __init__(self, size: int) -> None:
        self.n_rounds = 0
        self._said: dict[int, list[float]] = {}
        self._barrier = threading.Barrier(size)

    def most(self, index: int, values: Sequence[float]) -> list[float]:
        self._said[index] = list(values)
        self._barrier.wait(WAIT_S)
        found = [max(column) for column in zip(*self._said.values(), strict=True)]
        if self._barrier.wait(WAIT_S) == 0:  # one of them
            self.n_rounds += 1
        return found

    def end(self) -> None:
        """Nobody is waited for any more."""
        self._barrier.abort()


@dataclass
class Rank:
    """One learner rank: its end of the bus, and whom it told where it is."""

    name: str
    bus: Bus
    inbox: LearnerInbox
    rollout: Rollout
    failover: HeadFailover
    version: list[int]  # of its actor
    said: list[tuple[int, bool]] = field(default_factory=list)  # life of the head; whether another was told before
    ended: list[int] = field(default_factory=list)  # exit codes with which the process would have been ended


@dataclass
class Crew:
    """All ranks, and one end of the bus for all lives of the head, which the test plays."""

    head: Bus
    ranks: list[Rank]
    pool: ThreadPoolExecutor
    agreement: Agreement

    def tell(self, *said: m.Message, to: int | None = None) -> None:
        """Say it to one rank, or to all."""
        for rank in self.ranks if to is None else [self.ranks[to]]:
            for message in said:
                self.head.send(rank.name, message)

    def is_joined(self, life: int, of: int | None = None) -> None:
        """A head of this life is there, for one rank or for all; returns when they have heard."""
        self.tell(m.PeerList([], [], life), to=of)
        for rank in self.ranks if of is None else [self.ranks[of]]:
            wait_until(lambda rank=rank: rank.inbox.life == life)  # type: ignore[misc]

    def begin(self) -> None:
        """With the head of life 0."""
        self.is_joined(0)
        assert not any(self.all(lambda rank: rank.failover.confirm(False)))
        assert self.said == [[(0, False)]] * len(self.ranks)

    @property
    def said(self) -> list[list[tuple[int, bool]]]:
        return [rank.said for rank in self.ranks]

    def start(self, work: Callable[[Rank], Result]) -> "list[Future[Result]]":
        return [self.pool.submit(work, rank) for rank in self.ranks]

    def all(self, work: Callable[[Rank], Result]) -> list[Result]:
        """Every rank does it, at once."""
        return [doing.result(WAIT_S) for doing in self.start(work)]

    def take_batches(self) -> "list[Future[Batch | None]]":
        return self.start(lambda rank: rank.rollout.prepare_batch())

    def asked(self, step: int, life: int, of: int | None = None) -> None:
        """One rank, or all, have asked the head of this life for this batch, once, and said nothing else."""
        names = [rank.name for rank in (self.ranks if of is None else [self.ranks[of]])]
        heard = [self.head.receive(WAIT_S) for _ in names]
        assert sorted(heard, key=str) == [(name, m.BatchRequest(step, life)) for name in names]

    def is_quiet(self) -> None:
        assert self.head.receive(0) is None

    def share(self, step: int, seed: int) -> list[m.Message]:
        items = [replace(item, step=step) for item in random_shard(seed, clock=step)]
        return [*items, m.ShardEnd(step, step, len(items), 3, False)]

    def train(self) -> None:
        for rank in self.ranks:
            rank.version[0] += 1


@pytest.fixture
def crew(tmp_path: Path, size: int) -> Iterator[Crew]:
    head = Bus("head", job="test", listen=f"ipc://{tmp_path}/head")
    agreement = Agreement(size)
    with ThreadPoolExecutor(size) as pool:
        ranks = [rank_of(tmp_path, head, index, agreement) for index in range(size)]
        made = Crew(head, ranks, pool, agreement)
        yield made
        made.tell(m.Stop("the test is over"))  # whoever waits still, where it has failed
        agreement.end()
        pool.shutdown()
        for rank in ranks:
            rank.inbox.close()
            rank.bus.close()
    head.close()


def rank_of(folder: Path, head: Bus, index: int, agreement: Agreement) -> Rank:
    name = f"learner-{index}.0"
    bus = Bus(name, job="test")
    bus.connect("head", head.endpoint)
    bus.send("head", m.Ready(0))
    assert head.receive(WAIT_S) is not None  # the head has heard it, so it can answer
    said: list[tuple[int, bool]] = []
    ended: list[int] = []
    version = [0]
    inbox = LearnerInbox(bus, push_begun=lambda _: None, overdue=ended.append, rejoin_grace_s=0.05)
    failover = HeadFailover(
        inbox,
        lambda message: bus.send("head", message),
        most=lambda values: agreement.most(index, values),
        begin=lambda life, lives_on: said.append((life, lives_on)),
    )
    rollout = Rollout(
        failover,
        build=partial(build, eta=1, n_samples=4),
        journal=Journal(folder, role="learner", index=index, incarnation=0),
        heartbeat=HeartbeatState(),
        version=lambda: version[0],
    )
    return Rank(name, bus, inbox, rollout, failover, version, said, ended)


def taken(batches: "Sequence[Future[Batch | None]]") -> list[list[list[int]]]:
    """The tokens that each rank was given."""
    found = []
    for taking in batches:
        batch = taking.result(WAIT_S)
        assert batch is not None
        found.append([item.ids_T.tolist() for item in batch.items])
    return found


def dealt(step: int, seed: int) -> list[list[int]]:
    return [array.array("i", item.ids).tolist() for item in random_shard(seed, clock=step)]


@CROWDS
def test_without_another_head_a_batch_costs_one_agreement(crew: Crew) -> None:
    crew.begin()
    begun = crew.agreement.n_rounds
    for step in range(2):
        taking = crew.take_batches()
        crew.asked(step, 0)
        crew.tell(*crew.share(step, seed=step))
        assert taken(taking) == [dealt(step, seed=step)] * len(crew.ranks)
        crew.train()
    assert crew.agreement.n_rounds == begun + 2
    assert crew.said == [[(0, False)]] * len(crew.ranks)
    crew.is_quiet()


@CROWDS
def test_a_batch_that_all_ranks_hold_is_trained_and_the_next_head_learns_the_new_version(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1))
    crew.is_joined(1)
    assert taken(taking) == [dealt(0, seed=1)] * len(crew.ranks)
    assert all(rank.failover.has_new_head for rank in crew.ranks)
    assert crew.said == [[(0, False)]] * len(crew.ranks)  # in the middle of a step there is nothing to say
    crew.train()
    taking = crew.take_batches()
    crew.asked(1, 1)
    assert crew.said == [[(0, False), (1, True)]] * len(crew.ranks)
    crew.tell(*crew.share(1, seed=2))
    assert taken(taking) == [dealt(1, seed=2)] * len(crew.ranks)
    crew.is_quiet()


@CROWDS
def test_a_share_that_is_there_in_part_is_dropped_and_asked_for_again(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    for index in range(len(crew.ranks)):
        crew.tell(*crew.share(0, seed=1)[: index + 1], to=index)
    crew.is_joined(1)
    crew.asked(0, 1)
    crew.tell(*crew.share(0, seed=2))
    assert taken(taking) == [dealt(0, seed=2)] * len(crew.ranks)
    assert crew.said == [[(0, False), (1, True)]] * len(crew.ranks)
    crew.is_quiet()


@pytest.mark.parametrize("size", [2, 3])
def test_a_share_is_dropped_when_another_rank_has_none(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1), to=0)
    crew.tell(*crew.share(0, seed=1)[:-1], to=1)
    crew.is_joined(1)
    crew.asked(0, 1)
    crew.tell(*crew.share(0, seed=2))
    assert taken(taking) == [dealt(0, seed=2)] * len(crew.ranks)
    crew.is_quiet()


@pytest.mark.parametrize("size", [2, 3])
def test_shares_received_before_all_ranks_know_the_new_head_are_dropped(crew: Crew) -> None:
    """One has its share and knows of no other head yet; its word counts as little as its share."""
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1), to=0)
    for index in range(1, len(crew.ranks)):
        crew.is_joined(1, of=index)
    crew.is_joined(1, of=0)
    crew.asked(0, 1)
    crew.tell(*crew.share(0, seed=2))
    assert taken(taking) == [dealt(0, seed=2)] * len(crew.ranks)


@CROWDS
def test_two_heads_may_die_one_after_the_other_in_one_wait(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1)[:3])
    crew.is_joined(1)
    crew.asked(0, 1)
    crew.tell(*crew.share(0, seed=2)[:5])
    crew.is_joined(2)
    crew.asked(0, 2)
    crew.tell(*crew.share(0, seed=3))
    assert taken(taking) == [dealt(0, seed=3)] * len(crew.ranks)
    assert crew.said == [[(0, False), (1, True), (2, True)]] * len(crew.ranks)
    crew.is_quiet()


@CROWDS
def test_only_the_last_of_several_heads_during_a_step_is_sent_a_report(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1))
    taken(taking)
    for life in (1, 2, 3):
        crew.is_joined(life)
    crew.train()
    taking = crew.take_batches()
    crew.asked(1, 3)
    crew.tell(*crew.share(1, seed=2))
    assert taken(taking) == [dealt(1, seed=2)] * len(crew.ranks)
    assert crew.said == [[(0, False), (3, True)]] * len(crew.ranks)
    crew.is_quiet()


@CROWDS
def test_a_late_rejoin_of_an_old_head_aborts_nothing(crew: Crew) -> None:
    """Whenever anybody joins all are told who is there: such letters are left over from a step."""
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(*crew.share(0, seed=1))
    taken(taking)
    crew.tell(m.PeerList(["generator-0.1"], [""], 0))
    crew.is_joined(1)
    crew.tell(m.PeerList(["generator-0.1"], [""], 1))
    crew.train()
    taking = crew.take_batches()
    crew.asked(1, 1)
    crew.tell(*crew.share(1, seed=2))
    assert taken(taking) == [dealt(1, seed=2)] * len(crew.ranks)
    assert crew.said == [[(0, False), (1, True)]] * len(crew.ranks)
    crew.is_quiet()


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_have_joined_different_heads_agree_on_the_newest(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.is_joined(1, of=0)
    for index in range(1, len(crew.ranks)):
        crew.is_joined(2, of=index)
    wait_until(lambda: crew.ranks[0].failover.life == 2)  # it is told of no batch before it has joined that one, too
    wait_until(lambda: crew.said == [[(0, False)], *[[(0, False), (2, True)]] * (len(crew.ranks) - 1)])
    names = [rank.name for rank in crew.ranks[1:]]
    heard = [crew.head.receive(WAIT_S) for _ in names]
    assert sorted(heard, key=str) == [(name, m.BatchRequest(0, 2)) for name in names]
    crew.is_joined(2, of=0)
    crew.asked(0, 2, of=0)
    crew.tell(*crew.share(0, seed=2))
    assert taken(taking) == [dealt(0, seed=2)] * len(crew.ranks)
    assert crew.said == [[(0, False), (2, True)]] * len(crew.ranks)


@CROWDS
def test_a_stop_ends_ranks_that_wait_for_another_head(crew: Crew) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(m.Stop("enough"))
    for ending in taking:
        with pytest.raises(StopRun, match="enough"):
            ending.result(WAIT_S)


# after the end


def come_to_the_end(crew: Crew, *, drained: bool = False) -> None:
    crew.begin()
    taking = crew.take_batches()
    crew.asked(0, 0)
    crew.tell(m.NoBatch(0, drained))
    assert [ending.result(WAIT_S) for ending in taking] == [None] * len(crew.ranks)


@CROWDS
def test_after_the_end_a_new_head_is_sent_the_completed_state(crew: Crew) -> None:
    come_to_the_end(crew)
    for life in (1, 2):
        crew.is_joined(life)
        assert all(rank.failover.has_new_head for rank in crew.ranks)
        outliving = crew.start(lambda rank: rank.rollout.report_end_again())
        crew.asked(0, life)
        crew.tell(m.NoBatch(0, False))
        assert [done.result(WAIT_S) for done in outliving] == [None] * len(crew.ranks)
        assert crew.said[0][-1] == (life, True)


@CROWDS
def test_after_the_end_a_head_that_has_another_batch_sends_all_ranks_back(crew: Crew) -> None:
    come_to_the_end(crew)
    crew.is_joined(1)
    outliving = crew.start(lambda rank: rank.rollout.report_end_again())
    crew.asked(0, 1)
    crew.tell(*crew.share(0, seed=1))
    for back in outliving:
        with pytest.raises(Restart, match="this run had ended at 0"):
            back.result(WAIT_S)


@CROWDS
def test_a_drained_run_continues_from_its_checkpoint(crew: Crew) -> None:
    come_to_the_end(crew, drained=True)
    crew.is_joined(1)
    for back in crew.start(lambda rank: rank.rollout.report_end_again()):
        with pytest.raises(Restart, match="continues from the checkpoint on disk"):
            back.result(WAIT_S)
    crew.is_quiet()


# whether a head is outlived at all


@contextmanager
def bound(crew: Crew, *, lives_on: bool) -> Iterator[tuple[Rank, list[int]]]:
    """A learner that holds weights; lives of heads that it joins."""
    (rank,) = crew.ranks
    joined: list[int] = []
    rank.inbox.bind()
    if lives_on:
        rank.inbox.live_on(joined.append)
    crew.is_joined(0)
    yield rank, joined


@pytest.mark.parametrize("size", [1])
def test_a_head_of_another_incarnation_is_joined_while_the_inbox_is_not_read(crew: Crew) -> None:
    with bound(crew, lives_on=True) as (rank, joined):
        crew.tell(m.Rejoin("only a member may speak", life=1), m.Rejoin("only a member may speak", life=1))
        wait_until(lambda: joined == [1, 1])  # the same Join twice is one
        crew.is_joined(1)
        rank.inbox.check()
        assert not rank.ended


@pytest.mark.parametrize("size", [1])
@pytest.mark.parametrize(
    ("said", "lives_on"),
    [
        (m.Rejoin("its connection was broken", life=0), True),
        (m.Rejoin("no waypoint", life=1, anew=True), True),
        (m.Rejoin("learner-1.1 begins anew", life=0, anew=True), True),
        (m.Rejoin("only a member may speak", life=1), False),  # it is loading
    ],
)
def test_a_learner_goes_back_to_its_checkpoint(crew: Crew, said: m.Rejoin, lives_on: bool) -> None:
    """The same head has lost what nobody repeats; another may not know it; a learner that loads holds nothing."""
    with bound(crew, lives_on=lives_on) as (rank, joined):
        crew.tell(said)
        wait_until(lambda: rank.ended == [codes.RESTART])
        assert joined == []
        with pytest.raises(Restart, match=said.reason):
            rank.inbox.check()


@pytest.mark.parametrize("size", [1])
def test_a_learner_that_survived_a_head_can_still_be_sent_back(crew: Crew) -> None:
    with bound(crew, lives_on=True) as (rank, joined):
        crew.tell(m.Rejoin("only a member may speak", life=1))
        wait_until(lambda: joined == [1])
        crew.is_joined(1)
        crew.tell(m.Rejoin("no waypoint on disk says what it had", life=1, anew=True))
        wait_until(lambda: rank.ended == [codes.RESTART])
        with pytest.raises(Restart, match="no waypoint"):
            rank.inbox.take()


# real processes, over gloo


@pytest.mark.slow
def test_two_learner_processes_survive_two_heads_and_lose_no_update(tmp_path: Path) -> None:
    """The first in the middle of a batch that one of them has, the second in the middle of a step."""
    with script(tmp_path, n_learners=2, checkpoint={"every_steps": 2, "at_end": False}) as head:
        head.assemble()
        digests = [update(head, step, life=0) for step in range(3)]
        assert head.take(m.Checkpointed).version == 2
        await_requests(head, 3, life=0)
        head.hand_out(3, last=False, to=[0])
        begin = head.succeed(1)
        assert (begin.version, begin.digest, begin.lives_on, begin.sealed) == (3, digests[2], True, [2])
        digests.append(update(head, 3, life=1))
        await_requests(head, 4, life=1)
        head.hand_out(4, last=False)
        begin = head.succeed(2)
        assert (begin.version, begin.life, begin.lives_on) in [(4, 2, True), (5, 2, True)]
        if begin.version == 4:  # the other head came before the share
            assert begin.digest == digests[3]
            update(head, 4, life=2)
        tensors, pushed = head.push(5)
        assert tensors
        assert pushed not in digests
        update(head, 5, life=2, last=True)
        for _ in range(2):
            head.take(m.Finished)
        assert head.end() == [codes.DONE, codes.DONE]
        assert [line["version"] for line in head.journal("step")] == [1, 2, 3, 4, 5, 6]
        assert head.incarnations == [0, 0]


def update(head: Script, step: int, *, life: int, last: bool = False) -> str:
    await_requests(head, step, life=life)
    head.hand_out(step, last=last)
    return head.take(m.UpdateDone, lambda done: done.version == step + 1).digest


def await_requests(head: Script, step: int, *, life: int) -> None:
    for _ in range(head.n_learners):
        assert head.take(m.BatchRequest, lambda asked: asked.life == life).step == step
