"""Learner ranks as threads, over a real bus to a head that the test plays."""

import array
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from actors.learner.batching import Batch, build
from actors.learner.link.inbox import LearnerInbox
from actors.learner.link.rollout import HeadFailover, Rollout
from actors.runtime.context import HeartbeatState
from areal_bus import messages as m
from areal_bus.storage.journal import Journal
from areal_bus.transport.bus import Bus
from tests.support.learner_setup import random_shard
from tests.support.polling import wait_until

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
    begun: list[m.PushBegin] = field(default_factory=list)
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

    def begin_a_batch(self) -> "list[Future[Batch | None]]":
        """Of step 0: all ranks wait for it."""
        self.begin()
        taking = self.take_batches()
        self.asked(0, 0)
        return taking

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

    def hand_out(self, step: int, *, n_items: int = 12, last: bool = False) -> None:
        *items, _ = self.share(step, seed=step)
        self.tell(*items, m.ShardEnd(step, step, n_items, 3, last))

    def is_trained(self, taking: "list[Future[Batch | None]]", *, seed: int, step: int = 0) -> None:
        """This share comes, and all ranks take it."""
        self.tell(*self.share(step, seed))
        assert taken(taking) == [dealt(step, seed)] * len(self.ranks)

    def train(self) -> None:
        for rank in self.ranks:
            rank.version[0] += 1


@pytest.fixture
def size() -> int:
    """Ranks, where a test names no other number."""
    return 1


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
    begun: list[m.PushBegin] = []
    said: list[tuple[int, bool]] = []
    ended: list[int] = []
    version = [0]
    inbox = LearnerInbox(bus, push_begun=begun.append, overdue=ended.append, rejoin_grace_s=0.05)
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
    return Rank(name, bus, inbox, rollout, failover, version, begun, said, ended)


@pytest.fixture
def begun(crew: Crew) -> Crew:
    """With the head of life 0."""
    crew.begin()
    return crew


def taken(batches: "Sequence[Future[Batch | None]]") -> list[list[list[int]]]:
    """The tokens that each rank was given."""
    found = []
    for taking in batches:
        batch = taking.result(WAIT_S)
        found.append([item.ids_T.tolist() for item in batch.items])
    return found


def dealt(step: int, seed: int) -> list[list[int]]:
    return [array.array("i", item.ids).tolist() for item in random_shard(seed, clock=step)]
