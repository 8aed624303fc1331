"""The bus between two real ends over ipc and tcp."""

import gc
import socket
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq

from areal_bus.errors import EndpointTaken
from areal_bus.messages import Ack, HeadHeartbeat, Heartbeat, Message, Stop, Trajectory
from areal_bus.transport.bus import BusOptions, Heartbeats
from areal_bus.transport.receiver import Received, ReceiveQueue
from areal_bus.transport.send_queue import size
from areal_bus.wire import bundle, codec
from areal_bus.wire.header import object_bytes
from tests.support.polling import wait_until
from tests.support.strangers import OpenBus as Bus
from tests.support.strangers import next_of

JOB = "job-1"


def ack(n: int) -> Ack:
    return Ack(uid=n, sample=0, attempt=0, evaluation="")


def trajectory(n_bytes: int) -> Trajectory:
    return Trajectory(
        uid=1, sample=0, attempt=0, evaluation="", generator="g", finish="stop", segments=[[n_bytes // 4 - 1, 1]],
        spans=[[0, 1]],
        seconds=0.5, term=0, ids=b"\0" * n_bytes, logps=b"\0" * 4, prompt_text="p", text="é", row="{}",
    )  # fmt: skip


Opened = Callable[..., Bus]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens buses that end with the test: one that listens, or one that is connected to others."""
    made: list[Bus] = []

    def open_bus(name: str, *to: Bus, listen: str = "", job: str = JOB, **more: Any) -> Bus:
        bus = Bus(name, job=job, listen=listen or ("" if to else f"ipc://{tmp_path}/{name}"), **more)
        made.append(bus)
        for other in to:
            bus.connect(other.name, other.endpoint)
        return bus

    yield open_bus
    for bus in reversed(made):
        bus.close()


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_messages_arrive_in_order_both_ways(opened: Opened, transport: str) -> None:
    head = opened("head", listen="" if transport == "ipc" else "tcp://127.0.0.1:0")
    actor = opened("generator-0.0", head)
    for n in range(3000):
        actor.send("head", ack(n))
    assert [next_of(head) for _ in range(3000)] == [("generator-0.0", ack(n)) for n in range(3000)]
    for n in range(3000):
        head.send("generator-0.0", ack(n))
    assert [next_of(actor) for _ in range(3000)] == [("head", ack(n)) for n in range(3000)]


def test_messages_of_a_broadcast_arrive_in_order_at_every_peer(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    head, other = opened("head"), opened("other")
    actor = opened("generator-0.0", head, other)
    kick, n_kicks = actor._kick, Counter[str]()
    monkeypatch.setattr(actor, "_kick", lambda: (n_kicks.update(["once"]), kick()))
    actor.send_all(("other" if n % 3 else "head", ack(n)) for n in range(1, 300))
    actor.send_all([])
    assert n_kicks["once"] == 1
    actor.send("head", ack(300))
    assert [next_of(head) for _ in range(100)] == [("generator-0.0", ack(n)) for n in range(3, 301, 3)]
    assert [next_of(other)[1] for _ in range(200)] == [ack(n) for n in range(300) if n % 3]
    actor.send_all([("head", ack(1)), ("head", replace(trajectory(64), text="x" * (9 << 20))), ("head", ack(2))])
    assert [next_of(head)[1] for _ in range(2)] == [ack(1), ack(2)]
    [undelivered] = actor.send_queues.take_undelivered()
    assert undelivered.why.startswith("Trajectory cannot be sent: text too large")
    wait_until(lambda: actor.n_waiting("head") == 0, "nothing counts that was not sent")


def test_messages_sent_together_to_one_peer_are_one_zeromq_message(tmp_path: Path) -> None:
    together: list[Message] = [*map(ack, range(64)), trajectory(400), Stop("last")]
    with zmq.Context() as context, context.socket(zmq.ROUTER) as peer:
        peer.bind(f"ipc://{tmp_path}/peer")
        actor = Bus("generator-0.0", job=JOB)
        actor.connect("peer", f"ipc://{tmp_path}/peer")
        actor.send_all(("peer", message) for message in together)
        assert peer.poll(10_000)
        _, *frames = peer.recv_multipart()
        assert [codec.decode(part, job=JOB) for part in bundle.split(frames)] == together
        wait_until(lambda: actor.n_waiting("peer") == 0, "nothing waits any more")
        actor.close()


def memory_of(message: Message) -> int:
    frames = codec.encode(message, job=JOB)
    return size(frames) + object_bytes(bytes(frames[0]))


SPANS = [[version, 1] for version in range(300, 2300)]  # versions that Python keeps no objects of


@pytest.mark.slow
@pytest.mark.parametrize(
    "message",
    [Heartbeat(1, 2, "samples 3"), ack(1), trajectory(400), replace(trajectory(8004), spans=SPANS[:1000],
     segments=[[1001, 1000]], logps=bytes(4000))],
    ids=["Heartbeat", "Ack", "Trajectory", "Trajectory with spans"],
)  # fmt: skip
def test_the_inbox_counts_no_less_than_messages_take_in_memory(message: Message) -> None:
    frames = [bytes(frame) for frame in codec.encode(message, job=JOB)]
    n = min(4000, (2 << 20) // size(frames))
    tracemalloc.start()
    kept = [codec.decode([bytes(bytearray(frame)) for frame in frames], job=JOB) for _ in range(n)]
    taken = tracemalloc.get_traced_memory()[0] / n
    tracemalloc.stop()
    assert len(kept) == n
    assert taken <= memory_of(message) <= 8 * taken  # of small messages less: bytes of text may look like lists


def test_an_inbox_counts_of_each_message_the_memory_that_it_takes(opened: Opened) -> None:
    head = opened("head")
    actor = opened("generator-0.0", head)
    together = [ack(1), trajectory(400), ack(2)]
    actor.send_all(("head", message) for message in together)
    for n in range(3):
        next_of(head)
        assert head.receive_queue.n_consumed == sum(memory_of(one) for one in together[: n + 1])
    assert head.receive_queue.n_received == head.receive_queue.n_consumed


def test_messages_sent_before_a_disconnect_are_delivered(opened: Opened) -> None:
    """Even when the bus thread finds both orders at once."""
    head = opened("head")
    actor = opened("generator-0.0", head)
    actor.send("head", ack(0))
    next_of(head)
    letters = [actor.send_queues.enqueue("head", codec.encode(ack(n), job=JOB)) for n in (1, 2)]
    actor._order(lambda: actor._orders.extend([*letters, lambda: actor._disconnect("head")]))
    assert [next_of(head)[1] for _ in range(2)] == [ack(1), ack(2)]


def test_heartbeats_go_out_while_the_loop_is_busy(opened: Opened) -> None:
    head, beats = opened("head"), iter(range(10**6))
    opened("g", head, heartbeats=Heartbeats(lambda: HeadHeartbeat(0, next(beats)), every_s=0.01, to="head"))
    assert [next_of(head)[1] for _ in range(3)] == [HeadHeartbeat(term=0, version=n) for n in range(3)]


def test_a_full_inbox_stops_reading_and_loses_nothing(opened: Opened) -> None:
    head = opened("head", options=BusOptions(inbox_bytes=1 << 20))
    actor = opened("g", head)
    for _ in range(100):
        actor.send("head", trajectory(400_000))
    actor.send("head", Stop("last"))
    got = [next_of(head)[1]]
    opened("probe", head)
    assert head.receive_queue.n_received - head.receive_queue.n_consumed <= (1 << 20) + 400_000 + 1000
    got += [next_of(head)[1] for _ in range(100)]
    assert got == [*[trajectory(400_000)] * 100, Stop("last")]


def received(n_bytes: int, sender: str = "generator-0.0") -> Received:
    return sender, Stop("for example"), n_bytes


def test_senders_are_taken_from_in_turn_and_a_flood_of_one_delays_no_report_of_time() -> None:
    inbox = ReceiveQueue(1 << 20)
    inbox.put([received(1, "generator-66.0")] * 1000)
    inbox.put([received(1, "generator-0.0"), received(1, "reward-0.0")])
    began = inbox.until
    inbox.mark_complete(began + 1.0)
    assert [inbox.take(0)[0] for _ in range(4)] == ["generator-66.0", "generator-0.0", "reward-0.0", "generator-66.0"]
    assert inbox.until == began + 1.0
    assert [inbox.take(0, skips=lambda sender: sender == "generator-66.0")] == [None]
    assert sum(inbox.take(0) is not None for _ in range(2000)) == 998


def test_a_wake_up_ends_a_wait_and_is_kept_for_the_take_that_would_wait() -> None:
    inbox = ReceiveQueue(1 << 20)
    inbox.wake()
    inbox.put([received(1)])
    assert inbox.take(None) == received(1)
    assert inbox.take(None) is None
    assert inbox.take(0) is None


def test_messages_taken_and_refused_are_freed_without_the_collector(opened: Opened) -> None:
    """Heads and rewards let it look seldom: nothing that came in may wait for it."""
    head = opened("head")
    actor, foreign = opened("g", head), opened("foreign", head, job="another job")
    gc.collect()
    gc.disable()
    try:
        for _ in range(200):
            actor.send("head", trajectory(40_000))
            foreign.send("head", trajectory(40_000))
            head.send("nobody", ack(1))
            assert next_of(head) == ("g", trajectory(40_000))
            head.send("g", ack(1))
            assert next_of(actor) == ("head", ack(1))
        n_cycles = gc.collect()
    finally:
        gc.enable()
    assert n_cycles < 100


def test_a_port_in_use_is_refused_with_the_key_to_change() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EndpointTaken, match=r"must listen on .*: Address already in use"):
            Bus("head", job=JOB, listen=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
