"""What a peer does not take: how much of it waits, what becomes of the rest, and who hears of that."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import zmq
from loguru import logger

import actors.rewards.actor
from actors.rewards.actor import RewardLoop
from actors.rewards.pool import WorkerOrder, WorkerPool
from actors.runtime.context import HeartbeatState, journal_undelivered
from actors.runtime.head_session import ActorRuntime, HeadSession
from areal_bus.messages import Prompt, Stop
from areal_bus.storage.journal import Journal
from areal_bus.transport import send_queue
from areal_bus.transport.listener import CLIENT_AHEAD
from areal_bus.wire.bundle import split
from tests.areal_bus.transport.test_bus import JOB, trajectory
from tests.support.polling import wait_until
from tests.support.strangers import OpenBus as Bus
from tools import run

REWARD = "reward-0.0"
N_BYTES = 100_000


@dataclass(frozen=True)
class Deaf:
    """A generator's bus, and a reward that never reads."""

    bus: Bus
    endpoint: str
    socket: zmq.Socket[bytes]

    def hear_all(self) -> None:
        """It reads after all, until there is nothing left."""
        while self.socket.poll(500):
            self.socket.recv_multipart()

    @property
    def n_waiting(self) -> int:
        return self.bus.n_waiting(REWARD)


@contextmanager
def deaf_reward(folder: Path, *, name: str = REWARD) -> Iterator[Deaf]:
    endpoint = f"ipc://{folder}/deaf"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as reward:
        reward.setsockopt(zmq.RCVHWM, 1)
        reward.setsockopt(zmq.LINGER, 0)
        reward.bind(endpoint)
        bus = Bus("generator-0.0", job=JOB)
        bus.connect(name, endpoint)
        try:
            yield Deaf(bus, endpoint, reward)
        finally:
            bus.close(0)


@contextmanager
def listening(name: str, folder: Path) -> Iterator[Bus]:
    bus = Bus(name, job=JOB, listen=f"ipc://{folder}/{name}")
    try:
        yield bus
    finally:
        bus.close(0)


@contextmanager
def warnings() -> Iterator[list[str]]:
    told: list[str] = []
    number = logger.add(lambda message: told.append(message.record["message"]), level="WARNING")
    try:
        yield told
    finally:
        logger.remove(number)


def test_resendable_messages_are_dropped_beyond_a_bound_in_bytes_and_drops_are_reported(tmp_path: Path) -> None:
    """Each doubling of the count is logged and journalled; other messages stay queued."""
    with warnings() as told, deaf_reward(tmp_path) as deaf:
        deaf.bus.send_queues.max_resent_bytes = 1 << 20
        for _ in range(4 * CLIENT_AHEAD):
            deaf.bus.send(REWARD, trajectory(N_BYTES))
        wait_until(
            lambda: not deaf.bus._orders and deaf.bus.send_queues.undelivered[REWARD], "what is beyond it is void"
        )
        n_void = deaf.bus.send_queues.undelivered[REWARD]
        assert deaf.n_waiting <= 1 << 20
        for _ in range(100):
            deaf.bus.send(REWARD, Prompt(0, 0, 0, [0], "", "x" * 60_000))
        wait_until(lambda: not deaf.bus._orders, "they wait")
        assert deaf.bus.send_queues.undelivered[REWARD] == n_void
        assert deaf.n_waiting > 2 << 20
        journal = Journal(tmp_path / "journal", role="generator", index=0, incarnation=0)
        journal_undelivered(deaf.bus, journal)
        journal_undelivered(deaf.bus, journal)
    doubled = [1 << k for k in range(n_void.bit_length())]
    why = f"messages to {REWARD} were dropped, {{}} so far: its socket is full and 1 MiB are queued"
    assert told == [f"generator-0.0: {why.format(k)}" for k in doubled]
    (note,) = run.lines(journal.path, "note")
    assert (note["peer"], note["n"], note["text"]) == (REWARD, doubled[-1], why.format(doubled[-1]))


@pytest.mark.parametrize("name", ["generator-66.0", "learner-0.0"])
def test_other_messages_are_bounded_in_bytes_too_except_a_learners_batches(tmp_path: Path, name: str) -> None:
    with deaf_reward(tmp_path, name=name) as deaf:
        deaf.bus.send_queues.max_kept_bytes = 1 << 20
        for _ in range(8 * CLIENT_AHEAD):
            deaf.bus.send(name, Prompt(0, 0, 0, [0], "", "x" * 60_000))
        wait_until(lambda: not deaf.bus._orders, "they wait")
        assert (deaf.bus.n_waiting(name) <= 1 << 20) == (name != "learner-0.0")
        assert (deaf.bus.send_queues.undelivered[name] > 0) == (name != "learner-0.0")


def test_a_reward_takes_nothing_in_while_the_head_does_not_take_its_verdicts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actors.rewards.actor, "ROOM_BYTES", 1 << 20)
    journal = Journal(tmp_path / "journal", role="reward", index=0, incarnation=0)
    with (
        deaf_reward(tmp_path, name="head") as deaf,
        WorkerPool(WorkerOrder("sums", tmp_path), n_workers=1, timeout_s=10.0) as pool,
        listening(REWARD, tmp_path) as bus,
    ):
        bus.connect("head", deaf.endpoint)
        runtime = ActorRuntime(bus, HeadSession(bus, silent_s=60.0), journal, HeartbeatState())
        loop = RewardLoop(runtime, pool, capacity=1, n_generators=1)
        for _ in range(4 * CLIENT_AHEAD):
            bus.send("head", Prompt(0, 0, 0, [0], "", "x" * 60_000))
        wait_until(lambda: not bus._orders, "they wait")
        deaf.bus.connect(REWARD, bus.endpoint)
        deaf.bus.send(REWARD, trajectory(400))
        wait_until(lambda: bus.receive_queue.n_received > 0, "it has come in")
        for _ in range(20):
            loop.turn()
        assert bus.receive_queue.n_consumed == 0
        deaf.hear_all()
        wait_until(lambda: (loop.turn(), run_has_score(journal))[1], "it is scored")


def run_has_score(journal: Journal) -> bool:
    return bool(list(run.lines(journal.path, "score")))


def test_bytes_wait_from_the_call_of_send_until_they_go_or_their_peer_is_let_go(tmp_path: Path) -> None:
    with deaf_reward(tmp_path) as deaf:
        assert deaf.n_waiting == 0
        deaf.bus.send(REWARD, trajectory(N_BYTES))
        wait_until(lambda: deaf.n_waiting == 0, "ZeroMQ takes it")
        for _ in range(4 * CLIENT_AHEAD):
            deaf.bus.send(REWARD, trajectory(N_BYTES))
        assert deaf.n_waiting > N_BYTES
        deaf.bus.disconnect(REWARD)
        deaf.bus.send(REWARD, trajectory(N_BYTES))
        wait_until(lambda: deaf.n_waiting == 0, "the queue is empty")
        wait_until(
            lambda: deaf.bus.send_queues.undelivered[REWARD] == 1, "a message to a peer that has left is discarded"
        )
        deaf.bus.send("nobody", Stop("now"))
        wait_until(lambda: deaf.bus.send_queues.undelivered["nobody"] == 1, "a message to an unknown peer is discarded")
        assert deaf.bus.n_waiting("nobody") == 0


def test_a_bundle_that_is_void_counts_as_so_many_messages() -> None:
    box = send_queue.SendQueues("a bus", None, {}, {})
    for _ in range(40):
        box.enqueue("nobody", [b"four"])()
    box.flush()
    assert box.undelivered == {"nobody": 40}
    assert [(void.peer, void.n) for void in box.take_undelivered()] == [("nobody", 40)]
    assert box.n_bytes("nobody") == 0


def test_a_burst_is_sent_while_it_is_posted_and_does_not_reach_the_bounds(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, context.socket(zmq.ROUTER) as reward:
        dealer.setsockopt(zmq.LINGER, 0)
        reward.bind(f"ipc://{tmp_path}/burst")
        dealer.connect(f"ipc://{tmp_path}/burst")
        box = send_queue.SendQueues("a bus", None, {REWARD: dealer}, {}, max_resent_bytes=1 << 20)
        box.max_queued = 300
        for frames in [*[[b"few", b"bytes"]] * 1000, *[[b"many", bytes(50_000)]] * 100]:
            box.enqueue(REWARD, frames, is_resent=True)()
        box.flush()
        assert not box.undelivered


def test_resendable_messages_are_dropped_beyond_the_bound_and_all_others_arrive_in_order(tmp_path: Path) -> None:
    """Also when both kinds share one bundle."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer, context.socket(zmq.ROUTER) as reward:
        box = send_queue.SendQueues("a bus", None, {REWARD: dealer}, {}, max_resent_bytes=1000)
        for n in range(20):
            box.enqueue(REWARD, [b"%02d" % n, bytes(98)], is_resent=n % 2 == 0)()
            box.flush()  # it takes none: it is not connected
        assert box.undelivered == {REWARD: 5}
        assert box.n_bytes(REWARD) == 1500
        reward.bind(f"ipc://{tmp_path}/late")
        dealer.connect(f"ipc://{tmp_path}/late")
        box.flush()
        assert (box.waiting, box.n_bytes(REWARD)) == ({}, 0)
        numbers: list[int] = []
        while len(numbers) < 15:
            assert reward.poll(10_000)
            numbers += [int(part[0]) for part in split(reward.recv_multipart()[1:])]
        assert numbers == [*range(10), *range(11, 20, 2)]
