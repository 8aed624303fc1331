"""One peer that sends without end: the others are read, answered and missed as without it."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq

from areal_bus.messages import Disconnected, Heartbeat, Stop
from areal_bus.transport.bus import Bus, BusOptions
from areal_bus.transport.receive_queue import ReceiveQueue
from areal_bus.transport.receiver import Received
from areal_bus.wire import bundle, codec
from tests.support.strangers import JOB, NAME, until

FLOODER = NAME.partition(b"/")[0].decode()
HONEST = "generator-0.0"


@contextmanager
def flood(endpoint: str) -> Iterator[None]:
    """Bundles of heartbeats, as fast as they are taken."""
    frames = codec.encode(Heartbeat(1, None, ""), job=JOB)
    together, _ = bundle.join([frames] * bundle.MAX_MESSAGES)
    stop = threading.Event()

    def send() -> None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as one:
            one.setsockopt(zmq.IDENTITY, NAME)
            one.setsockopt(zmq.LINGER, 0)
            one.setsockopt(zmq.SNDTIMEO, 100)
            one.connect(endpoint)
            while not stop.is_set():
                with contextlib.suppress(zmq.Again):
                    one.send_multipart(together)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_a_flood_puts_off_neither_reports_of_ended_connections_nor_the_time_that_is_read(tmp_path: Path) -> None:
    """For as long as bundles of heartbeats came, no death was noticed: neither by its connection nor by silence."""
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/head", options=BusOptions(reports_disconnects=True))
    honest = Bus(HONEST, job=JOB)
    honest.connect("head", head.endpoint)
    honest.send("head", Heartbeat(1, None, ""))
    try:
        assert head.receive(20.0) == (HONEST, Heartbeat(1, None, ""))
        with flood(head.endpoint):
            until(lambda: head.receive(0) is not None, "the flood has begun")
            began = head.until
            honest.close()
            until(lambda: is_gone(head), "its end is reported in the flood")
            until(lambda: (head.receive(0), head.until > began)[1], "the time moves in the flood")
    finally:
        head.close(0)


def is_gone(head: Bus) -> bool:
    got = head.receive(0)
    assert got is None or got[0] in (FLOODER, HONEST)
    return got == (HONEST, Disconnected())


def test_a_message_of_another_peer_overtakes_a_flood(tmp_path: Path) -> None:
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/head")
    honest = Bus(HONEST, job=JOB)
    honest.connect("head", head.endpoint)
    try:
        with flood(head.endpoint):
            until(lambda: head.receive_queue.n_received > 1 << 20, "a backlog of it waits")
            honest.send("head", Heartbeat(7, None, ""))
            taken = []
            until(lambda: taken.append(head.receive(0)) or taken[-1] == (HONEST, Heartbeat(7, None, "")), "it is read")
    finally:
        honest.close(0)
        head.close(0)


def of(sender: str, n_bytes: int) -> Received:
    return sender, Stop("for example"), n_bytes


def test_a_hog_fills_the_inbox_and_others_still_find_room() -> None:
    inbox = ReceiveQueue(100)
    inbox.count([of(FLOODER, 90), of(HONEST, 5)])
    assert not inbox.is_hog(FLOODER)  # there is room
    inbox.count([of(HONEST, 10)])
    assert inbox.is_full
    assert inbox.has_hog
    assert inbox.is_hog(FLOODER)
    assert not inbox.is_hog(HONEST)
    inbox.count([of(HONEST, 100)])
    assert not inbox.has_hog  # full once more: nobody is read
    inbox.consume(of(FLOODER, 90))
    inbox.consume(of(HONEST, 100))
    assert not inbox.is_full


def test_what_a_hog_sends_is_dropped_while_another_peer_is_read(tmp_path: Path) -> None:
    """A full inbox was not read at all, whoever had filled it."""
    options = BusOptions(inbox_bytes=1 << 20)
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/head", options=options)
    honest = Bus(HONEST, job=JOB)
    honest.connect("head", head.endpoint)
    honest.send("head", Heartbeat(1, None, ""))
    try:
        assert head.receive(20.0) == (HONEST, Heartbeat(1, None, ""))
        with flood(head.endpoint):
            until(lambda: head.refused[FLOODER, "quota"] > 100, "the flood is over its quota")
            assert head.receive_queue.n_received - head.receive_queue.n_consumed < 3 << 20
            honest.send("head", Heartbeat(2, None, ""))
            waits = head.receive_queue._received
            until(lambda: waits[HONEST] > waits_of(Heartbeat(1, None, "")), "the other one's is read though it is full")
    finally:
        honest.close(0)
        head.close(0)


def waits_of(message: Heartbeat) -> int:
    return sum(map(len, codec.encode(message, job=JOB)))
