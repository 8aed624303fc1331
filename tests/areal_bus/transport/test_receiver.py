"""Connections that break, and members that do not hear: what the bus says of them, and what the head does then."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.membership import MemberState
from areal_bus.core.parts.ledger import PromptState
from areal_bus.messages import Heartbeat, Stop
from areal_bus.transport.bus import Bus, BusOptions
from areal_bus.transport.receiver import Received, ReceiveQueue, Receiver, is_connected
from areal_bus.transport.rejections import Rejections
from areal_bus.transport.send_queue import SendQueues
from areal_bus.wire import codec
from tests.areal_bus.core.test_head import head_with, joined, records, refused, scored, sent
from tests.faults.proxy import Proxy
from tests.support.polling import wait_until
from tests.support.strangers import JOB, next_of, word
from tests.support.strangers import NAME as STRANGER

NAME = "generator-0.0"


@contextlib.contextmanager
def pair(*, reports_disconnects: bool = True) -> Iterator[tuple[Bus, Bus, Proxy]]:
    """A head, and an actor that is connected to it through a proxy and was heard."""
    head = Bus("head", job=JOB, listen="tcp://127.0.0.1:0", options=BusOptions(reports_disconnects=reports_disconnects))
    proxy = Proxy(head.endpoint)
    actor = Bus(NAME, job=JOB)
    actor.connect("head", proxy.endpoint)
    actor.send("head", word(0))
    assert next_of(head) == (NAME, word(0))
    yield head, actor, proxy
    actor.close(0)
    head.close(0)
    proxy.close()


# the bus


@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_a_disconnect_is_reported_after_all_messages_of_the_connection(tmp_path: Path, transport: str) -> None:
    listen = f"ipc://{tmp_path}/s" if transport == "ipc" else "tcp://127.0.0.1:0"
    head = Bus("head", job=JOB, listen=listen, options=BusOptions(reports_disconnects=True))
    actor = Bus(NAME, job=JOB)
    actor.connect("head", head.endpoint)
    for number in range(100):
        actor.send("head", word(number))
    actor.close()
    assert [next_of(head) for _ in range(101)] == [*((NAME, word(n)) for n in range(100)), (NAME, m.Disconnected())]
    head.close(0)


@pytest.mark.parametrize("silently", [False, True])
def test_a_reconnect_is_reported_as_a_disconnect_first(silently: bool) -> None:
    """Also when the head goes on believing in the connection before (half-open)."""
    with pair() as (head, actor, proxy):
        for number in range(1, 4):
            proxy.cut(silently=silently)
            wait_until(lambda: proxy.n_connections == 1, "it connects again")
            actor.send("head", word(number))
            assert next_of(head) == (NAME, m.Disconnected())
            assert next_of(head) == (NAME, word(number))
        assert head.receive(0.1) is None


def test_a_send_to_a_lost_connection_reports_it_when_its_last_messages_are_read(tmp_path: Path) -> None:
    """The send can fail before ZeroMQ reports the end of the connection (EHOSTUNREACH)."""
    endpoint = f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.bind(endpoint)
        receiver = Receiver(JOB, None, None, Rejections("head"), authorise=lambda *_: None)
        queues = SendQueues("head", router, {}, receiver.clients, unreachable=receiver.lose)
        actor = Bus(NAME, job=JOB)
        actor.connect("head", endpoint)
        actor.send("head", word(0))
        wait_until(lambda: bool(router.poll(100)), "its message arrives")
        assert [message for _, message, _ in receiver.from_client(router)] == [word(0)]
        connection = receiver.clients[NAME]
        actor.close()
        wait_until(lambda: not is_connected(router, connection), "the connection ends")
        queues.enqueue(NAME, [b"lost"])()
        queues.flush()
        assert (queues.undelivered[NAME], receiver.disconnected) == (1, [])  # messages may still wait to be read
        receiver.end_connections(set())
        assert (receiver.disconnected, receiver.clients) == ([NAME], {})
        receiver.end_connections({connection})
        assert receiver.disconnected == [NAME]  # once


def test_disconnects_are_not_reported_unless_requested() -> None:
    with pair(reports_disconnects=False) as (head, actor, proxy):
        proxy.cut()
        wait_until(lambda: proxy.n_connections == 1, "it connects again")
        actor.send("head", word(1))
        assert next_of(head) == (NAME, word(1))


def test_silence_begins_with_the_first_output_and_is_not_counted_while_nothing_is_read() -> None:
    with pair() as (head, actor, _):
        assert actor.silence_s("head") == 0.0
        head.send(NAME, word(1))
        assert next_of(actor) == ("head", word(1))
        wait_until(lambda: actor.silence_s("head") > 0.05, "it grows")
        head.send(NAME, word(2))
        assert next_of(actor) == ("head", word(2))
        assert actor.silence_s("head") < 10.0
        actor.receive_queue.cap_bytes = 0  # a full inbox: nothing is read, so nobody is silent
        head.send(NAME, word(3))
        wait_until(lambda: actor.silence_s("head") == 0.0, "its inbox is full")


# one peer that sends without end: the others are read, answered and missed as without it

FLOODER = STRANGER.partition(b"/")[0].decode()
HONEST = NAME
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
    process = subprocess.Popen([sys.executable, "-c", FLOOD, bus.endpoint, STRANGER.decode(), JOB])
    try:
        wait_until(lambda: bus.receive_queue.n_received > before + BACKLOG_BYTES, "the flood has begun")
        yield
    finally:
        process.kill()
        process.wait()


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


# the head


def states(effects: list[Effect]) -> list[tuple[str, str]]:
    return [(line["state"], line["why"]) for line in records(effects, Event.MEMBER)]


def beat(*, hears: bool = True) -> m.Heartbeat:
    return m.Heartbeat(1, None, "", hears)


def ready_head(n_generators: int = 2) -> Head:
    head, _ = head_with(n_generators)
    head.tick(0.1)
    return head


def test_prompts_of_a_disconnected_generator_are_requeued_at_once() -> None:
    head = ready_head()
    held = [entry.uid for entry in head.state.ledger.open.values() if entry.holder == NAME]
    assert held
    effects = head.on(NAME, m.Disconnected(), 1.0)
    assert states(effects) == [("dead", "its connection is gone")]
    again = [(to, x.uid, x.attempt) for to, x in sent(effects, m.Prompt) if x.uid in held]  # type: ignore[union-attr]
    waiting = [uid for uid in held if head.state.ledger.open[uid].state is PromptState.QUEUED]
    assert {uid for _, uid, _ in again} | set(waiting) == set(held)
    assert {(to, attempt) for to, _, attempt in again} <= {("generator-1.0", 1)}
    effects = head.on(NAME, beat(), 1.5)
    assert [to for to, _ in sent(effects, m.Rejoin)] == [NAME]
    assert states(effects)[0] == ("stale", "heard again")
    assert sorted(x.uid for _, x in sent(effects, m.Cancel)) == sorted(held)  # type: ignore[union-attr]
    member = head.state.members.by_name[NAME]
    assert (member.load, member.version) == (0, None)
    late = head.on("reward-0.0", scored(held[0], 0), 2.0)
    assert "attempt" in refused(late)[0]
    assert len(sent(late, m.Ack)) == 1


@pytest.mark.parametrize(("name", "joins_again"), [("reward-0.0", False), ("learner-0.0", True)])
def test_a_disconnected_reward_is_kept_and_generators_and_learners_rejoin(name: str, joins_again: bool) -> None:
    head = ready_head()
    effects = head.on(name, m.Disconnected(), 1.0)
    assert bool(states(effects)) is not joins_again  # a learner is replaced by its next incarnation alone
    assert bool(sent(head.on(name, beat(), 1.5), m.Rejoin)) is joins_again
    assert not sent(head.on(name, beat(), 2.0), m.Rejoin)  # it is asked once


def test_a_disconnect_of_an_unknown_member_is_ignored() -> None:
    assert ready_head().on("generator-7.0", m.Disconnected(), 1.0) == []


def test_a_member_that_does_not_receive_the_heads_heartbeat_is_dead_until_it_does() -> None:
    head = ready_head()
    effects = head.on(NAME, beat(hears=False), 1.0)
    assert states(effects) == [("dead", "it does not hear the head")]
    for message in (beat(hears=False), m.Sampled(0, 0, 0, "", 3), beat(hears=False)):
        head.on(NAME, message, 1.2)
        assert head.state.members.by_name[NAME].standing is MemberState.DEAD
    assert states(head.on(NAME, beat(), 1.4))[0] == ("stale", "heard again")


def test_a_suspended_head_declares_no_deaf_member_dead() -> None:
    head = ready_head()
    for now in (60.0, 60.1):
        head.on(NAME, beat(hears=False), now)
        head.tick(now)
        assert head.state.members.by_name[NAME].standing is MemberState.HEALTHY
    late = 60.1 + head.state.rules.silent_s
    for now in (60.5 + 0.25 * n for n in range(int(4 * head.state.rules.silent_s))):
        for member in head.state.members.alive():
            head.on(member.name, beat(), now)
        head.tick(now)
    head.on(NAME, beat(hears=False), late + 1.0)
    assert head.state.members.by_name[NAME].standing is MemberState.DEAD


def push_all(head: Head, now: float) -> None:
    """Whoever is awaited in a push completes it."""
    while (push := head.state.pushes.current) is not None:
        for name in (push.root, *push.members):
            if name not in push.done | push.broken.keys():
                head.on(name, m.PushDone(push.id, push.version, f"digest {push.version}", 0.0, 0.0), now)


def test_a_prompt_is_blamed_for_deaths_alone_not_for_connections() -> None:
    """Or a bad network would have every prompt run alone (poison)."""
    head = ready_head(1)
    held = next(entry.uid for entry in head.state.ledger.open.values() if entry.holder == NAME)
    for n in range(1, 5):
        head.on(NAME, m.Disconnected(), float(n))
        assert head.state.ledger.open[held].n_deaths == 1
        head.on(NAME, beat(), n + 0.1)
        assert head.state.ledger.open[held].n_deaths == 0
        joined(head, NAME, now=n + 0.2, again=n)
        push_all(head, n + 0.4)
        assert head.state.ledger.open[held].holder == NAME
    head.on(NAME, m.Disconnected(), 10.0)
    joined(head, "generator-0.1", now=10.1)
    assert head.state.ledger.open[held].n_deaths == 1
