"""An attacker with the guests' key, or with one actor's key, can send messages only as that peer.

Real sockets with CURVE keys at a reward's and a head's door, and the head's own core behind its door.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect, Record, Send
from areal_bus.core.events import Event
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import KeyPair, Keyring, new_pair
from tests.areal_bus.core.test_head import LENGTH, head_with, refused, scored, sent
from tests.support.polling import wait_until
from tests.support.strangers import JOB, next_of

SEATS = ["head-0", "generator-0", "generator-1", "reward-0", "reward-1", "learner-0"]
PAIRS = {seat: new_pair() for seat in [*SEATS, "generator-*"]}
GUEST = PAIRS["generator-*"]
PUBLIC = {seat: pair.public for seat, pair in PAIRS.items()}
G0, G1, GUEST_0, GUEST_1 = "generator-0.0", "generator-1.0", "generator-66.0", "generator-66.1"
SECRET = b"of the head"
TRAJECTORY = m.Trajectory(
    uid=0, sample=0, attempt=0, evaluation="", generator=G0, finish="stop", segments=[[1, LENGTH]],
    spans=[[0, LENGTH]], seconds=0.0, term=0, ids=bytes(4 * (1 + LENGTH)), logps=bytes(4 * LENGTH), prompt_text="",
    text="forged", row='{"answer": "forged"}',
)  # fmt: skip


def pair_of(name: str) -> KeyPair:
    return PAIRS.get("head-0" if name == "head" else name.rpartition(".")[0], GUEST)


class Doors:
    """A listening actor with keys, and whoever connects to it."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self._stack, self.name = stack, name
        self.bus = self._open(name, pair_of(name), "tcp://127.0.0.1:0")

    def _open(self, name: str, own: KeyPair, listen: str = "") -> Bus:
        bus = Bus(name, job=JOB, listen=listen, keys=Keyring(own, PUBLIC))
        self._stack.callback(bus.close, 0)
        return bus

    def caller(self, name: str, own: KeyPair | None = None) -> Bus:
        """Connected under that name, with its own key unless another is given."""
        bus = self._open(name, own or pair_of(name))
        bus.connect(self.name, self.bus.endpoint)
        return bus

    def refuses(self, name: str, reason: str, n: int = 1) -> None:
        wait_until(lambda: self.bus.refused[name, reason] >= n, f"{reason} of {name} is counted: {self.bus.refused}")


@contextmanager
def doors(name: str) -> Iterator[Doors]:
    with ExitStack() as stack:
        yield Doors(stack, name)


FORGERS = {
    "the guests' key, in the name of a generator of the job": (GUEST_0, None, G0, "maker"),
    "the guests' key, in the name of another guest": (GUEST_0, None, "generator-67.0", "maker"),
    "the guests' key, under the name of a generator of the job": (G0, GUEST, G0, "key"),
    "a generator, in the name of another": (G1, None, G0, "maker"),
    "a generator, in the name of another incarnation of itself": ("generator-0.1", None, G0, "maker"),
}


@pytest.mark.parametrize("forger", FORGERS)
def test_a_reward_scores_no_trajectory_in_anothers_name(forger: str) -> None:
    name, own, maker, reason = FORGERS[forger]
    with doors("reward-0.0") as reward:
        honest, attacker = reward.caller(G0), reward.caller(name, own)
        attacker.send("reward-0.0", replace(TRAJECTORY, generator=maker))
        reward.refuses(name, reason)
        assert reward.bus.receive(0) is None
        honest.send("reward-0.0", TRAJECTORY)
        assert next_of(reward.bus) == (G0, TRAJECTORY)
        assert reward.bus.refused == {(name, reason): 1}


class Court:
    """A head's core behind its real door: what comes in is decided at once."""

    def __init__(self, stack: ExitStack) -> None:
        self.door = Doors(stack, "head")
        self.head, _ = head_with(2, secret=SECRET)
        self.entry = self.head.state.ledger.open[0]
        assert self.entry.holder == G0

    def lease(self, uid: int = 0, attempt: int = 0, evaluation: str = "") -> str:
        return self.head.state.lease_ids.of(evaluation, uid, attempt)

    def decides(self) -> list[Effect]:
        sender, message = next_of(self.door.bus)
        return self.head.on(sender, message, 0.0)

    @property
    def state(self) -> tuple[object, ...]:
        """All that a forged result could change."""
        ledger, partials = self.head.state.ledger, self.head.state.partials
        entries = [(e.uid, e.holder, e.attempt, e.state, sorted(e.sampled), sorted(e.scored)) for e in ledger.live()]
        leased = {name: sorted(member.leased) for name, member in self.head.state.members.by_name.items()}
        return entries, leased, len(partials), self.head.state.gate.free


@contextmanager
def court() -> Iterator[Court]:
    with ExitStack() as stack:
        yield Court(stack)


def of(generator: str, lease: str, **changes: object) -> m.Scored:
    return replace(scored(0, 0, generator=generator), ids=bytes(4 * (1 + LENGTH)), lease=lease, **changes)


def test_a_reward_scores_only_trajectories_sent_to_it_by_a_generator() -> None:
    with court() as it:
        rogue, right = it.door.caller("reward-1.0"), it.lease()
        it.head.on("reward-1.0", m.Join("reward-1.0", "reward", 1, 0, "there", 1, ""), 0.0)
        before = it.state
        guesses = ["", "0" * 16, "\N{SNOWMAN}", it.lease(1)]
        for forged in [*(of(G0, guess) for guess in guesses), of(G0, it.lease(0, 1)), of(G0, it.lease(0, 0, "before"))]:
            rogue.send("head", forged)
            effects = it.decides()
            assert "wrong lease id in a result of" in refused(effects)[0]
            assert not sent(effects, m.Ack)  # else the generator would forget its own
            assert it.state == before
        it.door.caller("reward-0.0").send("head", of(G0, right))
        assert [x.event for x in it.decides() if isinstance(x, Record)] == [Event.SCORED]
        assert it.entry.scored[0].lease == ""  # what is kept goes to disk


def joined_guest(it: Court, name: str = GUEST_0) -> Bus:
    guest = it.door.caller(name)
    guest.send("head", m.Join(name, "generator", 66, int(name[-1]), "", 1, ""))
    it.decides()
    guest.send("head", m.Ready(4))
    it.decides()
    return guest


PARTIAL = m.Partial(0, 0, 0, 0, [[1, 2]], [[0, 2]], bytes(12), bytes(8))
CLAIMS = {
    "a sample of another's lease": m.Sampled(0, 0, 0, "", LENGTH),
    "that another's lease cannot be made": m.SampleFailed(0, 0, "", "sampling_error", "forged"),
    "to give another's lease back": m.SampleFailed(0, 0, "", "lost_timeline", "forged"),
    "tokens of another's lease": PARTIAL,
}


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_guest_reports_its_own_leases_alone(claim: str) -> None:
    with court() as it:
        guest, before = joined_guest(it), it.state
        guest.send("head", CLAIMS[claim])
        assert refused(it.decides())
        assert it.state == before


def test_partials_for_a_prompt_without_a_lease_are_refused() -> None:
    """Whoever held it last may offer what it has: it knows the lease. Others would have their tokens trained."""
    with court() as it:
        guest = joined_guest(it)
        it.head.state.ledger.lose(G0)
        for lease in ("", "0" * 16, it.lease(1)):
            guest.send("head", replace(PARTIAL, lease=lease))
            assert "wrong lease id in a result of" in refused(it.decides())[0]
        assert len(it.head.state.partials) == 0
        it.door.caller(G0).send("head", replace(PARTIAL, lease=it.lease()))
        assert not refused(it.decides())
        assert len(it.head.state.partials) == 1


@pytest.mark.parametrize("reason", ["sampling_error", "lost_timeline"])
def test_a_problem_of_an_evaluation_is_given_up_by_its_holder_alone(reason: str) -> None:
    head, _ = head_with(2, n_problems=2)
    evaluation = head.state.evaluations.open
    assert evaluation is not None
    uid, holder = next(iter(evaluation.leased.items()))
    other = G1 if holder == G0 else G0
    forged = m.SampleFailed(uid, evaluation.attempts[uid], "before", reason, "forged")
    assert "does not hold" in refused(head.on(other, forged, 0.0))[0]
    assert evaluation.leased[uid] == holder
    assert not evaluation.failed
    assert not refused(head.on(holder, forged, 0.0))


def test_no_guest_takes_the_place_of_another_one_that_is_there() -> None:
    with court() as it:
        victim = joined_guest(it)
        thief = it.door.caller(GUEST_1)
        thief.send("head", m.Join(GUEST_1, "generator", 66, 1, "", 1, ""))
        it.door.refuses(GUEST_1, "taken")
        same = it.door.caller(GUEST_0)
        same.send("head", m.LeaveRequest())
        it.door.refuses(GUEST_0, "taken")
        of_the_job = it.door.caller("generator-0.1", GUEST)
        of_the_job.send("head", m.Join("generator-0.1", "generator", 0, 1, "", 1, ""))
        it.door.refuses("generator-0.1", "key")
        victim.send("head", m.Heartbeat(1, None, ""))
        it.decides()
        members = it.head.state.members.by_name
        assert GUEST_0 in members
        assert not members[GUEST_0].leaving
        assert members.keys().isdisjoint({GUEST_1, "generator-0.1"})
        victim.close(0)  # its actor has died, and its supervisor starts it again
        wait_until(lambda: _joins_again(it), "its next incarnation is let in")
        assert GUEST_1 in members
        assert GUEST_0 not in members


def _joins_again(it: Court) -> bool:
    """A try of the guest's next incarnation, by a connection of its own."""
    again = it.door.caller(GUEST_1)
    again.send("head", m.Join(GUEST_1, "generator", 66, 1, "", 1, ""))
    got = it.door.bus.receive(0.5)
    if got is not None:
        it.head.on(*got, 0.0)
    return got is not None


def test_ids_of_leases_differ_by_prompt_attempt_evaluation_and_job() -> None:
    head, effects = head_with(2, secret=SECRET)
    prompts = [message for _, message in sent(effects, m.Prompt)]
    told = {message.lease for message in prompts if isinstance(message, m.Prompt)}
    assert len(told) == len(prompts) > 1
    assert all(len(lease) == 16 for lease in told)
    ids = head.state.lease_ids
    assert len({ids.of("", 1, 11), ids.of("", 11, 1), ids.of("1", 1, 11), ids.of("", 111, 1)}) == 4
    other, _ = head_with(2, secret=b"of another job")
    assert other.state.lease_ids.of("", 0, 0) != ids.of("", 0, 0)


def test_a_lease_id_is_sent_only_to_the_holder_and_differs_for_a_guest() -> None:
    _, effects = head_with(2, secret=SECRET)
    holders = {message.uid: to for to, message in sent(effects, m.Prompt) if isinstance(message, m.Prompt)}
    leases = {message.lease: message.uid for _, message in sent(effects, m.Prompt) if isinstance(message, m.Prompt)}
    for effect in effects:
        if isinstance(effect, Send):
            for lease, uid in leases.items():
                assert effect.to == holders[uid] or lease not in repr(effect.message)


@pytest.mark.parametrize("maker", [G1, GUEST_0])
def test_a_sample_is_scored_for_the_holder_of_its_lease_alone(maker: str) -> None:
    """By a reward, with the right id, or by the guest's own trajectory on its way through an honest one."""
    with court() as it:
        it.door.caller("reward-0.0").send("head", of(maker, it.lease()))
        assert refused(it.decides()) == [f"{G0} holds prompt 0; {maker} claims a sample of it"]
        assert not it.entry.scored
