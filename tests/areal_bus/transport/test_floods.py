"""One peer that sends without end: the others are read, answered and missed as without it."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from areal_bus.messages import Disconnected, Heartbeat, Stop
from areal_bus.transport.bus import Bus, BusOptions
from areal_bus.transport.receiver import Received, ReceiveQueue
from areal_bus.wire import codec
from tests.support.polling import wait_until
from tests.support.strangers import JOB, NAME

FLOODER = NAME.partition(b"/")[0].decode()
HONEST = "generator-0.0"


FLOOD = """
import sys, zmq
from areal_bus.messages import Heartbeat
from areal_bus.wire import bundle, codec
endpoint, identity, job = sys.argv[1:]
frames, _ = bundle.join([codec.encode(Heartbeat(1, None, ""), job=job)] * bundle.MAX_MESSAGES)
with zmq.Context() as context, context.socket(zmq.DEALER) as one:
    one.setsockopt(zmq.IDENTITY, identity.encode())
    one.connect(endpoint)
    while True:
        one.send_multipart(frames)
"""
BACKLOG_BYTES = 2 << 20  # of a flood that has begun


@contextmanager
def flood(bus: Bus) -> Iterator[None]:
    """Send heartbeats without a pause, from another process: a thread of this one would share the GIL with the bus."""
    before = bus.receive_queue.n_received
    process = subprocess.Popen([sys.executable, "-c", FLOOD, bus.endpoint, NAME.decode(), JOB])
    try:
        wait_until(lambda: bus.receive_queue.n_received > before + BACKLOG_BYTES, "the flood has begun")
        yield
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_a_flood_puts_off_neither_reports_of_ended_connections_nor_the_time_that_is_read(tmp_path: Path) -> None:
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/head", options=BusOptions(reports_disconnects=True))
    honest = Bus(HONEST, job=JOB)
    honest.connect("head", head.endpoint)
    honest.send("head", Heartbeat(1, None, ""))
    try:
        assert head.receive(20.0) == (HONEST, Heartbeat(1, None, ""))
        with flood(head):
            began = head.until
            honest.close()
            wait_until(lambda: is_gone(head), "its end is reported in the flood")
            wait_until(lambda: (head.receive(0), head.until > began)[1], "the time moves in the flood")
    finally:
        head.close(0)


def is_gone(head: Bus) -> bool:
    got = head.receive(0)
    assert got is None or got[0] in (FLOODER, HONEST)
    return got == (HONEST, Disconnected())


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


def test_messages_of_a_flooding_peer_are_dropped_while_others_are_read(tmp_path: Path) -> None:
    options = BusOptions(inbox_bytes=BACKLOG_BYTES)
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/head", options=options)
    honest = Bus(HONEST, job=JOB)
    honest.connect("head", head.endpoint)
    honest.send("head", Heartbeat(1, None, ""))
    try:
        assert head.receive(20.0) == (HONEST, Heartbeat(1, None, ""))
        with flood(head):
            wait_until(lambda: head.refused[FLOODER, "quota"] > 100, "the flood is over its quota")
            assert head.receive_queue.n_received - head.receive_queue.n_consumed < 3 * BACKLOG_BYTES
            honest.send("head", Heartbeat(2, None, ""))
            waits = head.receive_queue._received
            wait_until(
                lambda: waits[HONEST] > waits_of(Heartbeat(1, None, "")), "the other one's is read though it is full"
            )
    finally:
        honest.close(0)
        head.close(0)


def waits_of(message: Heartbeat) -> int:
    return sum(map(len, codec.encode(message, job=JOB)))
