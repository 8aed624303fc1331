"""What a hostile peer may send or not send: it is refused, counted, named once, and nobody else notices."""

import dataclasses
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger

from areal_bus.core.effects import Effect, Progress, Record, Send
from areal_bus.core.events import Event
from areal_bus.messages import (
    BatchRequest,
    Checkpointed,
    Finished,
    HeadHeartbeat,
    Join,
    Message,
    Prompt,
    PushBroken,
    PushDone,
    Rejoin,
    Sampled,
    SampleFailed,
    Stop,
    UpdateDone,
)
from areal_bus.transport import rejections
from areal_bus.transport.bus import Bus, Heartbeats
from areal_bus.transport.curve import Keyring, new_pair
from areal_bus.transport.listener import GONE, LOCAL, UNLOGGED, max_connections
from areal_bus.transport.receiver import NAMELESS, SKIPPED, Received, Receiver
from areal_bus.transport.rejections import NAMED, OTHERS, STRIKES, Rejections
from areal_bus.wire import codec
from launch.run.bootstrap import EnvBootstrap, RanksMissing, identity
from tests.areal_bus.core.test_head import head_with, records
from tests.areal_bus.wire.test_bundle import ALL_BROKEN
from tests.areal_bus.wire.test_codec import HOSTILE, SCORED, VALUES, Values, of
from tests.support.polling import wait_until
from tests.support.strangers import JOB, RAW, dealer, dial, next_of, say_raw, word

ROOT = Path(__file__).parents[3]
HEAD, FRIEND = new_pair(), new_pair()
KEYS = {"head-0": HEAD.public, "generator-0": FRIEND.public}


@dataclasses.dataclass
class Pair:
    """A head that listens and a friend that it hears."""

    head: Bus
    friend: Bus
    said: list[str]  # warnings of both

    def is_well(self) -> None:
        """Both ways, nothing else in between."""
        self.friend.send("head", word(7))
        assert next_of(self.head) == ("generator-0.0", word(7))
        self.head.send("generator-0.0", word(8))
        assert next_of(self.friend) == ("head", word(8))


@pytest.fixture
def said() -> Iterator[list[str]]:
    """What is logged from WARNING on."""
    lines: list[str] = []
    sink = logger.add(lines.append, level="WARNING", format="{message}")
    yield lines
    logger.remove(sink)


@contextmanager
def pair_at(listen: str, *, keys: bool = False) -> Iterator[Pair]:
    said: list[str] = []
    sink = logger.add(said.append, level="WARNING", format="{message}")
    head = Bus("head", job=JOB, listen=listen, keys=Keyring(HEAD, KEYS) if keys else None)
    friend = Bus("generator-0.0", job=JOB, keys=Keyring(FRIEND, KEYS) if keys else None)
    friend.connect("head", head.endpoint)
    pair = Pair(head, friend, said)
    try:
        pair.is_well()
        yield pair
    finally:
        friend.close(0)
        head.close(0)
        logger.remove(sink)


@pytest.fixture(params=["ipc", "tcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pair]:
    with pair_at(f"ipc://{tmp_path}/s" if request.param == "ipc" else "tcp://127.0.0.1:0") as made:
        yield made


@pytest.mark.parametrize("cases", [HOSTILE, ALL_BROKEN], ids=["messages", "bundles"])
def test_everything_hostile_is_refused_counted_once_and_without_effect(
    pair: Pair, cases: dict[str, tuple[list[bytes], str]]
) -> None:
    small = {name: case for name, case in cases.items() if case[0] and sum(map(len, case[0])) < 1 << 20}
    with ExitStack() as stack:
        for number, (frames, _) in enumerate(small.values()):
            name = b"generator-%d.0/0123456789abcdef" % (100 + number)
            stack.enter_context(dealer(pair.head.endpoint, name)).send(*frames)
        wait_until(lambda: pair.head.refused.total() >= len(small), "all are counted")
        pair.is_well()
    expected = {(f"generator-{100 + number}.0", reason): 1 for number, (_, reason) in enumerate(small.values())}
    assert pair.head.refused == expected
    for peer, _ in expected:
        assert sum(repr(peer) in line for line in pair.said) == 1


@pytest.mark.parametrize("keys", [False, True])
def test_raw_bytes_are_counted_and_without_effect(keys: bool) -> None:
    with pair_at("tcp://127.0.0.1:0", keys=keys) as pair:
        say_raw(pair.head.endpoint, list(RAW.values()))
        wait_until(lambda: pair.head.refused.total() >= len(RAW), "all are counted")
        pair.is_well()
        peers = {peer for peer, _ in pair.head.refused}
        assert peers <= {"127.0.0.1", GONE, NAMELESS}  # GONE: it hung up before it was looked at
        assert len(pair.said) <= len(peers) + 1  # one line a peer, and one for who is struck off


@pytest.mark.parametrize(
    "identity", [b"stranger", b"generator-0.0", b"generator-0.0/short", b"../../x/0123456789abcdef", b"x" * 255]
)
def test_a_connection_without_a_proper_name_is_refused(pair: Pair, identity: bytes) -> None:
    with dealer(pair.head.endpoint, identity) as stranger:
        stranger.send(*codec.encode(word(1), job=JOB))
        wait_until(lambda: pair.head.refused, "it is counted")
        pair.is_well()
        assert [reason for _, reason in pair.head.refused] == ["name"]
        assert repr(identity[:40]) in pair.said[0]


def test_a_peer_is_banned_after_repeated_refusals_and_its_next_incarnation_is_not(pair: Pair) -> None:
    with dealer(pair.head.endpoint) as stranger:
        for _ in range(STRIKES):
            stranger.send(b"garbage")
        stranger.send(*codec.encode(word(1), job=JOB))  # a good one, too late
        wait_until(lambda: pair.head.refused["generator-66.0", "struck_off"], "it is struck off")
        pair.is_well()
        assert sum("is banned" in line for line in pair.said) == 1
    with dealer(pair.head.endpoint, b"generator-66.1/0123456789abcdef") as again:
        again.send(*codec.encode(word(1), job=JOB))
        assert next_of(pair.head) == ("generator-66.1", word(1))


def test_a_thief_of_a_name_does_not_have_its_owner_struck_off(pair: Pair) -> None:
    with dealer(pair.head.endpoint, b"generator-0.0/0123456789abcdef") as thief:
        for _ in range(2 * STRIKES):
            thief.send(*codec.encode(word(1), job=JOB))
        wait_until(lambda: pair.head.refused["generator-0.0", "struck_off"] == STRIKES, "the thief is struck off")
        pair.is_well()


def test_an_endless_message_is_taken_a_little_at_a_time(tmp_path: Path) -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.bind(f"ipc://{tmp_path}/s")
    intake = Receiver(JOB, None, None, Rejections("head"), authorise=lambda *_: None)
    n_frames, n_turns = 10_000, 0
    with dealer(f"ipc://{tmp_path}/s") as stranger:
        stranger.send(*[b""] * n_frames)
        stranger.send(*codec.encode(word(1), job=JOB))
        assert router.poll(10_000)
        received: list[Received] = []
        while not received:
            received = intake.from_client(router)
            n_turns += 1
    assert [one[:2] for one in received] == [("generator-66.0", word(1))]
    assert n_turns > n_frames / (SKIPPED + codec.MAX_FRAMES + 1)
    router.close()
    context.term()


def test_a_client_refuses_a_server_that_sends_garbage(tmp_path: Path) -> None:
    head = Bus("head", job="another job", listen=f"ipc://{tmp_path}/s")
    actor = Bus("generator-0.0", job=JOB)
    actor.connect("head", head.endpoint)
    actor.send("head", word(0))
    wait_until(lambda: head.refused["generator-0.0", "job"], "the head has heard it")
    with dealer(head.endpoint) as member:  # of that other job
        member.send(*codec.encode(word(1), job="another job"))
        next_of(head)
    head._order(lambda: head._receiver.clients.update({"generator-0.0": actor._identity}))
    for n in range(STRIKES + 1):
        head.send("generator-0.0", Stop("of another job"))  # alone: what goes together is refused once
        wait_until(lambda n=n: actor.refused.total() > n, "it is refused")
    assert actor.refused["head", "struck_off"] == 1
    assert actor.refused["head", "job"] == STRIKES
    assert actor.receive(0) is None
    actor.close(0)
    head.close(0)


def test_a_peer_that_never_reads_costs_a_bounded_queue_and_no_other_peer_a_message(pair: Pair) -> None:
    pair.head.send_queues.max_queued = 500
    with dealer(pair.head.endpoint) as deaf:
        deaf.send(*codec.encode(word(0), job=JOB))
        assert next_of(pair.head) == ("generator-66.0", word(0))
        answer = Prompt(0, 0, 0, [0], "", "x" * 10_000)
        for _ in range(6000):  # 60 MB
            pair.head.send("generator-66.0", answer)
        pair.is_well()
        wait_until(lambda: pair.head.send_queues.undelivered["generator-66.0"] > 0, "the queue is full")
        assert len(pair.head.send_queues.waiting.get("generator-66.0", ())) <= 500  # none: its socket took the rest


def test_heartbeats_are_not_queued_for_a_peer_that_does_not_read(tmp_path: Path) -> None:
    beat = Heartbeats(lambda: HeadHeartbeat(term=0, version=0), every_s=0.001)
    head = Bus("head", job=JOB, listen=f"ipc://{tmp_path}/s", heartbeats=beat)
    with dealer(head.endpoint) as deaf:
        deaf.send(*codec.encode(word(0), job=JOB))
        next_of(head)
        big = Prompt(0, 0, 0, [0], "", "x" * 60_000)
        for _ in range(3000):
            head.send("generator-66.0", big)
        wait_until(lambda: "generator-66.0" in head.send_queues.waiting and not head._orders, "it takes no more")
        before = len(head.send_queues.waiting["generator-66.0"])
        deaf.send(*codec.encode(word(1), job=JOB))
        for n in range(20):  # many a heartbeat's time
            deaf.send(*codec.encode(word(n), job=JOB))
            next_of(head)
        assert len(head.send_queues.waiting["generator-66.0"]) <= before
    head.close(0)


def idle(endpoint: str, n: int, stack: ExitStack) -> None:
    for _ in range(n):
        stack.enter_context(dial(endpoint))


def test_idle_connections_do_not_block_new_peers() -> None:
    with pair_at("tcp://127.0.0.1:0", keys=True) as pair, ExitStack() as stack:
        idle(pair.head.endpoint, 5000, stack)
        pair.is_well()
        newcomer = Bus("generator-0.1", job=JOB, keys=Keyring(FRIEND, KEYS))
        newcomer.connect("head", pair.head.endpoint)
        newcomer.send("head", word(1))
        assert next_of(pair.head) == ("generator-0.1", word(1))
        newcomer.close(0)


@pytest.mark.slow
def test_idle_connections_are_cut_off_after_a_while() -> None:
    with pair_at("tcp://127.0.0.1:0", keys=True) as pair, ExitStack() as stack:
        idle(pair.head.endpoint, 200, stack)
        wait_until(lambda: pair.head.refused["127.0.0.1", "handshake"] >= 200, "all are cut off")
        pair.is_well()


FULL = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 200))  # the head may raise the first
from areal_bus.transport.bus import Bus, BusOptions, Heartbeats
from areal_bus.messages import Stop
head = Bus("head", job="job", listen="tcp://127.0.0.1:0")
print(head.endpoint, flush=True)
while True:
    sender, _ = head.receive()
    try:
        open("/dev/null").close()
        has_files = True
    except OSError:
        has_files = False
    head.send(sender, Stop(f"{head.refused['too many at once', 'full']} {has_files}"))
"""


def test_a_full_listener_refuses_new_connections_keeps_old_ones_and_reopens() -> None:
    assert max_connections(200) == 150
    house = subprocess.Popen([sys.executable, "-c", FULL], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert house.stdout is not None
    endpoint = house.stdout.readline().strip()
    guest = Bus("generator-0.0", job=JOB)
    guest.connect("head", endpoint)

    def asked() -> tuple[int, bool]:
        """How many it has turned away, and whether it can open a file."""
        guest.send("head", word(1))
        answer = next_of(guest)[1]
        assert isinstance(answer, Stop)
        n, has_files = answer.reason.split()
        return int(n), has_files == "True"

    try:
        assert asked() == (0, True)
        with ExitStack() as stack:
            idle(endpoint, 400, stack)
            wait_until(lambda: asked()[0] >= 250 and asked()[1], "it turns away who has no max_connections")
            assert asked()[0] < 300
        newcomer = Bus("generator-1.0", job=JOB)
        newcomer.connect("head", endpoint)
        newcomer.send("head", word(3))
        assert isinstance(next_of(newcomer)[1], Stop)
        newcomer.close(0)
    finally:
        guest.close(0)
        house.kill()
        house.communicate()


def test_counts_and_log_are_bounded_whatever_comes(said: list[str]) -> None:
    counted = Rejections("head")
    for number in range(3 * NAMED):
        for _ in range(2):
            counted.add(f"peer-{number}", "header", "not one msgpack map", connection=b"%d" % number)
    assert len(counted.counts) == len(counted.take()) == NAMED + 1
    assert counted.counts[OTHERS, "header"] == 4 * NAMED
    assert len(said) == NAMED + 1
    assert len(counted._strikes) <= rejections.WATCHED


def test_refusals_are_reported_when_they_are_new_and_when_they_have_doubled() -> None:
    counted = Rejections("head")
    for number, peer in enumerate(("a", "a", "b", "a")):
        counted.add(peer, "job", f"message {number}")
    assert [(x.peer, x.reason, x.sentence, x.n) for x in counted.take()] == [
        ("a", "job", "message 1", 2),
        ("b", "job", "message 2", 1),
    ]
    assert counted.take() == []
    for _ in range(1000):
        counted.add("a", "job", "again")
    assert [x.n for x in counted.take()] == [512]
    assert counted.counts["a", "job"] == 1003


def test_strangers_at_the_rendezvous_are_overlooked(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/meet"
    environments = [{"RANK": str(rank), "WORLD_SIZE": "2"} for rank in range(2)]
    first = EnvBootstrap(url, 20, environments[0])
    met: list[list[bytes]] = []
    thread = threading.Thread(target=lambda: met.append(first.allgather(b"zero")))
    with ExitStack() as stack:
        for name in (b"stranger", identity(7), identity(0), b"r\1\0\0\0\0"):
            stack.enter_context(dealer(url, name)).send(b"garbage")
        stack.enter_context(dealer(url, identity(1) + b"x")).send(b"garbage", b"more")
        thread.start()
        say_raw(url, list(RAW.values()))
        second = EnvBootstrap(url, 20, environments[1])
        assert second.allgather(b"one") == [b"zero", b"one"]
        thread.join()
    assert met == [[b"zero", b"one"]]
    second.close()
    first.finish_exchanges()
    with pytest.raises((ConnectionError, FileNotFoundError)):
        dial(url)
    first.close()


def test_a_stranger_does_not_stretch_the_wait_for_ranks(tmp_path: Path) -> None:
    url = f"ipc://{tmp_path}/meet"
    waiting = EnvBootstrap(url, 0.3, {"RANK": "0", "WORLD_SIZE": "2"})
    with dealer(url, b"stranger") as stranger:
        for _ in range(1000):
            stranger.send(b"garbage")
        with pytest.raises(RanksMissing, match="rank 1 did not come"):
            waiting.allgather(b"")
    waiting.close()


def events(effects: list[Effect]) -> list[Event]:
    return [effect.event for effect in effects if isinstance(effect, Record)]


NAMES = ["generator-0.0", "generator-1.0", "reward-0.0", "learner-0.0"]
ENUMS = [*NAMES, "", "generator-0.1", "head", "digest 0", "before"]
LIKELY: Values = VALUES | {
    int: st.sampled_from([0, 0, 1, 2, 3, 7, -1, 1000, 2**31, 2**63 - 1, -(2**63)]),  # ids of now and of the future
    str: st.sampled_from(ENUMS),
    list[str]: st.lists(st.sampled_from(ENUMS), max_size=3),
}
ANYTHING = st.one_of([of(kind, LIKELY) for kind in codec.KINDS.values()])


@pytest.mark.parametrize("n", [40, pytest.param(3000, marks=pytest.mark.soak)])
def test_the_head_survives_any_sequence_of_valid_messages(n: int) -> None:

    @settings(max_examples=n, deadline=None)
    @given(
        st.lists(st.tuples(st.sampled_from([*NAMES, "generator-0.1", "reward-1.0", "x-0.0"]), ANYTHING), max_size=12)
    )
    def all_is_well(said: list[tuple[str, Message]]) -> None:
        head, _ = head_with(n_generators=2)
        for now, (sender, message) in enumerate(said):
            for effect in [*head.on(sender, message, now / 10), *head.tick(now / 10)]:
                if isinstance(effect, Send):
                    codec.encode(effect.message, job=JOB)

    all_is_well()


FUTURE = 2**62
IMPOSSIBLE = {
    "a verdict on a prompt of the future": ("reward-0.0", dataclasses.replace(SCORED, uid=FUTURE)),
    "a verdict on an attempt of the future": ("reward-0.0", dataclasses.replace(SCORED, attempt=FUTURE)),
    "a verdict on a sample that there is none of": ("reward-0.0", dataclasses.replace(SCORED, sample=FUTURE)),
    "a verdict in an evaluation that there is none of": ("reward-0.0", dataclasses.replace(SCORED, evaluation="none")),
    "a verdict by a generator": ("generator-0.0", SCORED),
    "a verdict on a sample of somebody else": ("reward-0.0", dataclasses.replace(SCORED, generator="generator-1.0")),
    "a verdict of a term of the future": ("reward-0.0", dataclasses.replace(SCORED, term=FUTURE)),
    "parts that are no JSON": ("reward-0.0", dataclasses.replace(SCORED, parts="{")),
    "parts that are a list": ("reward-0.0", dataclasses.replace(SCORED, parts="[1]")),
    "a part that is no number": ("reward-0.0", dataclasses.replace(SCORED, parts='{"a":"b"}')),
    "a part that is not finite": ("reward-0.0", dataclasses.replace(SCORED, parts='{"a":NaN}')),
    "a part larger than any float": ("reward-0.0", dataclasses.replace(SCORED, parts='{"a":1' + "0" * 400 + "}")),
    "a sample of the future": ("generator-0.0", Sampled(FUTURE, 0, 0, "", 3)),
    "a sample of a prompt before the first": ("generator-0.0", Sampled(-5, 0, 0, "", 3)),
    "a sample of an evaluation that there is none of": ("generator-0.0", Sampled(0, 0, 0, "none", 3)),
    "a sample of an attempt of the future": ("generator-0.0", Sampled(0, 0, FUTURE, "", 3)),
    "a sample that there is none of": ("generator-0.0", Sampled(0, FUTURE, 0, "", 3)),
    "a sample of what another generator holds": ("generator-1.0", Sampled(0, 0, 0, "", 3)),
    "a checkpoint of the future": ("learner-0.0", Checkpointed(FUTURE, "x")),
    "an end before the last batch": ("learner-0.0", Finished("", "")),
    "a failed prompt of the future": ("generator-0.0", SampleFailed(FUTURE, 0, "", "sampling_error", "")),
    "a push of the future": ("generator-0.0", PushDone(FUTURE, FUTURE, "x", 0.0, 0.0)),
    "an update of the future": ("learner-0.0", UpdateDone(FUTURE, {}, "x")),
    "a batch of the future": ("learner-0.0", BatchRequest(FUTURE)),
    "a join for somebody else": ("generator-0.0", Join("learner-0.1", "learner", 0, 1, "", 1, "")),
    "a join under a name of another role": ("reward-0.0", Join("reward-0.0", "learner", 0, 0, "", 1, "")),
}


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_the_head_refuses_messages_that_a_members_role_may_not_send(name: str) -> None:
    sender, message = IMPOSSIBLE[name]
    head, _ = head_with(2)
    assert head.state.ledger.open[0].holder == "generator-0.0"
    gate, terms = head.state.gate, head.state.terms
    before = (gate.u, gate.v, gate.w, terms.requests.copy(), terms.finished.copy())
    assert events(head.on(sender, message, 0.0)) == [Event.REFUSED]
    assert before == (gate.u, gate.v, gate.w, terms.requests, terms.finished)


def test_a_second_sampled_message_of_a_sample_is_refused() -> None:
    head, _ = head_with()
    said = [head.on("generator-0.0", Sampled(0, 0, 0, "", 3), 0.0) for _ in range(2)]
    assert [events(effects) for effects in said] == [[Event.SAMPLED], [Event.REFUSED]]


def test_a_verdict_of_a_term_of_the_future_is_not_acknowledged() -> None:
    head, _ = head_with()
    effects = head.on("reward-0.0", dataclasses.replace(SCORED, term=FUTURE), 0.0)
    assert not [effect for effect in effects if isinstance(effect, Send)]
    assert events(head.on("reward-0.0", SCORED, 0.0)) == [Event.SCORED]


@pytest.mark.parametrize("kind", [PushDone, PushBroken])
def test_a_push_of_another_version_than_the_one_in_flight_is_refused(kind: type) -> None:
    head, _ = head_with()
    head.on("learner-0.0", BatchRequest(0), 0.0)
    for entry in list(head.state.ledger.open.values()):
        for sample in entry.missing:
            head.on("reward-0.0", dataclasses.replace(SCORED, uid=entry.uid, sample=sample), 0.0)
    head.on("learner-0.0", UpdateDone(1, {}, "digest 1"), 0.0)
    push = head.state.pushes.current
    assert push is not None
    assert push.version == 1
    for version in (0, 2):
        rest = ("digest 0", 0.0, 0.0) if kind is PushDone else ("it broke",)
        effects = head.on("generator-0.0", kind(push.id, version, *rest), 0.0)
        assert events(effects) == [Event.REFUSED]
    assert head.state.members.by_name["generator-0.0"].version == 0
    assert not push.broken


def test_refused_messages_of_a_member_are_journalled_100_times_and_then_at_growing_intervals() -> None:
    head, _ = head_with()
    lines = [line for _ in range(1000) for line in head.on("reward-0.0", Sampled(0, 0, 0, "", 3), 0.0)]
    assert [line["n"] for line in records(lines, Event.REFUSED)] == [*range(1, 101), 128, 256, 512]
    notes = [line.fields["text"] for line in lines if isinstance(line, Progress)]
    assert len(notes) == 10  # at 1, 2, 4, 8, ...
    assert notes[0].startswith("refused Sampled of reward-0.0 (1 so far): ")


@settings(max_examples=60, deadline=None)
@given(st.one_of([of(kind, LIKELY) for name, kind in codec.KINDS.items() if name != "Join"]))
def test_messages_before_a_join_change_nothing(message: Message) -> None:
    head, _ = head_with()
    effects = head.on("generator-7.0", message, 0.0)
    assert events(effects) == [Event.REFUSED]
    answers = [effect for effect in effects if not isinstance(effect, Record)]
    assert all(isinstance(x, Send) and x.to == "generator-7.0" and isinstance(x.message, Rejoin) for x in answers)


def test_handshakes_that_local_processes_break_off_are_logged_when_they_repeat(said: list[str]) -> None:
    counted = Rejections("head")
    for _ in range(UNLOGGED):
        counted.add(LOCAL, "handshake", "a connection needs ZMTP", n_unlogged=UNLOGGED)
    assert (said, counted.counts[LOCAL, "handshake"]) == ([], UNLOGGED)
    counted.add("10.0.0.1", "handshake", "a connection needs ZMTP")
    for _ in range(3):
        counted.add(LOCAL, "handshake", "a connection needs ZMTP", n_unlogged=UNLOGGED)
    assert [LOCAL in line for line in said] == [False, True]
