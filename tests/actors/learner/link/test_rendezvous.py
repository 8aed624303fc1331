"""Learner ranks find each other at the store of rank 0, whoever dies and comes back meanwhile."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.learner.checkpoint.shards import Meeting, RankReport, conclude
from actors.learner.link.inbox import LearnerInbox, StopRun
from actors.learner.link.rendezvous import Rendezvous, lost_peer
from areal_bus import messages as m
from areal_bus.errors import CheckpointError, Restart
from areal_bus.transport.bus import Bus
from areal_bus.weights.process_group import join_store, serve_store
from tests.support.polling import wait_until

WORD = {"version": 7, "folder": "step-000007"}


@dataclass
class Rank:
    """One life of a learner rank as far as the meeting goes."""

    name: str
    bus: Bus
    inbox: LearnerInbox
    meeting: Rendezvous
    joined: list[str]  # again, because the head asked
    looked: threading.Event

    def close(self) -> None:
        self.inbox.close()
        self.bus.close()


@dataclass
class Place:
    """The head, and threads in which ranks wait."""

    head: Bus
    pool: ThreadPoolExecutor
    ranks: list[Rank] = field(default_factory=list)
    stores: list[Any] = field(default_factory=list)

    def rank(self, name: str) -> Rank:
        bus = Bus(name, job="test")
        bus.connect("head", self.head.endpoint)
        bus.send("head", m.Ready(0))
        assert self.head.receive(10.0) is not None  # it can answer now
        inbox = LearnerInbox(bus, push_begun=lambda _: None, overdue=lambda _: None)
        joined: list[str] = []
        looked = threading.Event()
        meeting = Rendezvous(inbox, name=name, join_again=lambda: joined.append(name), look=looked.set)
        self.ranks.append(Rank(name, bus, inbox, meeting, joined, looked))
        return self.ranks[-1]

    def store(self) -> str:
        store, endpoint = serve_store("127.0.0.1")
        self.stores.append(store)
        return endpoint

    def host(self, rank: Rank, endpoint: str, size: int) -> "Future[Any]":
        return self.pool.submit(rank.meeting.host, endpoint, lambda copies: WORD, size=size)

    def visit(self, rank: Rank, index: int, *hosts: tuple[str, str]) -> "Future[Any]":
        for name, endpoint in hosts:
            self.head.send(rank.name, m.PeerList(["reward-0.0", name], ["ipc://r", endpoint]))
        return self.pool.submit(rank.meeting.visit, index)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    head = Bus("head", job="test", listen=f"ipc://{tmp_path}/head")
    with ThreadPoolExecutor(4) as pool:
        made = Place(head, pool)
        yield made
        for rank in made.ranks:
            head.send(rank.name, m.Stop("the test is over"))
    for rank in made.ranks:
        rank.close()
    head.close()


def is_there(place: Place, rank: Rank, index: int) -> bool:
    store = place.stores[-1]
    key = f"meeting/here/{index}"
    return bool(store.check([key])) and store.get(key) == rank.name.encode()


def test_a_rank_that_came_back_before_all_were_there_is_the_one_that_counts(place: Place) -> None:
    root, dead, back, late = (place.rank(name) for name in ("learner-0.0", "learner-1.0", "learner-1.1", "learner-2.0"))
    endpoint = place.store()
    hosting = place.host(root, endpoint, 3)
    place.visit(dead, 1, (root.name, endpoint))
    wait_until(lambda: is_there(place, dead, 1))
    place.head.send(dead.name, m.Stop("killed here"))
    visits = [place.visit(back, 1, (root.name, endpoint))]
    wait_until(lambda: is_there(place, back, 1))
    visits.append(place.visit(late, 2, (root.name, endpoint)))
    assert [visit.result(10.0)[1] for visit in visits] == [WORD, WORD]
    hosting.result(10.0)


def test_a_rank_that_comes_too_late_waits_for_the_next_incarnation_of_rank_0(place: Place) -> None:
    root, gone = place.rank("learner-0.0"), place.rank("learner-1.0")
    first = place.store()
    hosting = place.host(root, first, 2)
    place.visit(gone, 1, (root.name, first)).result(10.0)
    hosting.result(10.0)
    back = place.rank("learner-1.1")
    visit = place.visit(back, 1, ("learner-0.0", "127.0.0.1:9"), (root.name, first))
    wait_until(back.looked.is_set)
    again, second = place.rank("learner-0.1"), place.store()
    hosting = place.host(again, second, 2)
    place.head.send(back.name, m.PeerList([again.name], [second]))
    assert visit.result(10.0)[1] == WORD
    hosting.result(10.0)
    assert is_there(place, back, 1)


def test_a_rank_that_waits_joins_again_when_asked_and_one_that_has_met_comes_back(place: Place) -> None:
    root, other = place.rank("learner-0.0"), place.rank("learner-1.0")
    endpoint = place.store()
    hosting = place.host(root, endpoint, 2)
    place.head.send(root.name, m.Rejoin("only a member may speak"))
    wait_until(lambda: root.joined == [root.name])
    place.visit(other, 1, (root.name, endpoint)).result(10.0)
    hosting.result(10.0)
    place.head.send(root.name, m.Rejoin("learner-1.1 begins anew"))
    with pytest.raises(Restart, match=r"learner-1\.1 begins anew"):
        root.inbox.take()
    assert root.joined == [root.name]


def test_stop_ends_the_wait_for_others(place: Place) -> None:
    root = place.rank("learner-0.0")
    hosting = place.host(root, place.store(), 2)
    place.head.send(root.name, m.Stop("enough"))
    with pytest.raises(StopRun, match="enough"):
        hosting.result(10.0)


def test_the_death_of_rank_0_in_a_checkpoint_is_that_of_a_peer_and_a_full_disk_is_not() -> None:
    """Its store ends with it, while another rank waits for its word: that rank comes back, too."""
    store, endpoint = serve_store("127.0.0.1")
    meeting = Meeting(index=1, size=2, number=0, store=join_store(endpoint, 10.0))

    def conclusion() -> CheckpointError:
        with pytest.raises(CheckpointError) as caught:
            conclude(meeting, RankReport({}), seal=lambda files: None, give_up=lambda: None)
        return caught.value

    store.set("checkpoint/0/word", "no space left on device")
    assert not lost_peer(conclusion())
    store.delete_key("checkpoint/0/word")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(conclusion)
        store.wait(["checkpoint/0/1"])
        del store
        assert lost_peer(waiting.result(10.0))
