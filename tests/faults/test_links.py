"""Rows 14 to 19 and 21 in the simulator: network faults between members and the production head.

Each test first shows that its fault occurs, and that a head without the matching rule would fail.
"""

from dataclasses import replace
from itertools import pairwise

import pytest

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import Role
from areal_lab.staleness.simulator.scenario import Fault, ScenarioLengths, Tail
from tests.faults.simulated import DONE, arrived, bent, key, lines, lost, play, scenario, shuffled, survive, when

SEEDS = range(6)
LEASE_S = 20.0  # a simulated generator silent for so long has lost its leases
BEAT_S = 6.0
LONG = ScenarioLengths(Tail.UNIFORM, 12.0, 0.0, 60)
GENERATOR = "generator-0.0"


def test_row_14_a_dropped_message_is_sent_again() -> None:
    n_lost = {m.Trajectory: 0, m.Scored: 0, m.Sampled: 0, m.Ack: 0, m.PushBegin: 0, m.PushDone: 0}
    n_again = 0
    for seed in range(9):
        ring = survive(scenario(seed, p_lost=0.3, silent_s=1000.0))
        for kind in n_lost:
            n_lost[kind] += len(lost(ring, kind))
        counted = {(line["uid"], line["attempt"], line["sample"]) for line in lines(ring, Event.SCORED)}
        n_again += len({key(x) for kind in (m.Trajectory, m.Scored) for x in lost(ring, kind)} & counted)
    assert min(n_lost.values()) > 10, n_lost
    assert n_again > 100  # a copy was lost, and a later one counted
    forgetful = scenario(p_lost=0.3, silent_s=1000.0, resend_s=1e9, patience_s=400.0)
    assert [x.invariant for x in play(forgetful)[1].violations] == ["I11"]  # without a retry all wait


def test_row_15_a_duplicated_message_counts_once() -> None:
    n_twice = 0
    for seed in SEEDS:
        ring = survive(scenario(seed, p_twice=0.9))
        scored = [key(x) for x in arrived(ring, m.Scored)]
        n_twice += len(scored) - len(set(scored))
        n_counted = len(lines(ring, Event.SCORED))
        assert n_counted <= len(set(scored))
        assert len(lines(ring, Event.REFUSED, what="Scored")) == len(scored) - n_counted
    assert n_twice > 200


def test_row_16_reordered_messages_change_neither_counts_nor_clocks() -> None:
    """Reordered messages: a verdict before the report of its sample, a version after a later one."""
    n_early = n_swapped = 0
    for seed in SEEDS:
        ring = survive(scenario(seed, silent_s=1000.0, push_timeout_s=100.0), bent(shuffled(seed, 30.0)))
        seen: set[tuple[int, int, int]] = set()
        for message in arrived(ring, m.Sampled | m.Scored):
            if isinstance(message, m.Scored):
                n_early += key(message) not in seen
            seen.add(key(message))
        versions = [beat.version for beat in arrived(ring, m.HeadHeartbeat)]
        n_swapped += sum(one > other for one, other in pairwise(versions))
    assert n_early > 20
    assert n_swapped > 5


def late(until_s: float) -> type:
    """All messages of generator 0 from second 14 on arrive together, in order."""
    return bent(lambda sender, to, _, now: until_s - now if sender == GENERATOR and 14.0 < now < until_s else 0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_row_17_a_sample_after_the_loss_of_its_lease_is_refused(seed: int) -> None:
    ring = survive(scenario(seed, total_steps=16, silent_s=LEASE_S, lengths=LONG, capacity=2), late(80.0))
    died = when(ring, Event.MEMBER, name=GENERATOR, state="dead")
    assert LEASE_S < died - 14.0 + BEAT_S < LEASE_S + 3 * BEAT_S
    again = [line for line in lines(ring, Event.LEASE) if line["attempt"] == 1]
    assert again
    assert {line["holder"] for line in again} == {"generator-1.0"}
    refused = [line for line in lines(ring, Event.REFUSED) if "at attempt 1" in line["why"] or "closed" in line["why"]]
    assert [line for line in refused if line["attempt"] == 0]
    states = [line["state"] for line in lines(ring, Event.MEMBER, name=GENERATOR)]
    assert states[states.index("dead") :][:3] == ["dead", "stale", "healthy"]


def deaf(to_head: bool, from_s: float, to_s: float) -> type:
    """One direction between the head and generator 0 is blocked: its messages wait, in order, or are lost."""

    def judge(sender: str, to: str, message: m.Message, now: float) -> float | None:
        is_shut = (sender, to) == ((GENERATOR, "head") if to_head else ("head", GENERATOR)) and from_s < now < to_s
        if is_shut and isinstance(message, m.Heartbeat | m.HeadHeartbeat):
            return None
        return to_s - now if is_shut else 0.0

    return bent(judge)


@pytest.mark.parametrize("to_head", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_row_18_a_one_way_partition_fences_the_member(seed: int, to_head: bool) -> None:
    ring = survive(
        scenario(seed, total_steps=24, silent_s=LEASE_S, calm_s=200.0, capacity=2), deaf(to_head, 10.0, 150.0)
    )
    out = when(ring, Event.MEMBER, name=GENERATOR, state="dead")
    assert LEASE_S < out - 10.0 + BEAT_S < LEASE_S + 3 * BEAT_S
    held = [record.fields for at_s, record in ring.records or () if record.event is Event.LEASE and out < at_s < 150.0]
    assert held
    assert {line["holder"] for line in held} == {"generator-1.0"}
    back = [line["state"] for line in lines(ring, Event.MEMBER, name=GENERATOR)]
    assert back[back.index("dead") :][:3] == ["dead", "stale", "healthy"]
    assert ring.head.state.gate.u == 24


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_row_19_a_partition_that_heals_consumes_nothing_twice(policy: StalenessPolicy) -> None:
    """Of a generator, a reward, the learner, the head: long enough to lose all leases."""
    for seed in SEEDS:
        for role in (Role.GENERATOR, Role.REWARD, Role.LEARNER, Role.HEAD):
            cut = Fault("cut", role, 0, 12.0, 70.0)
            one = scenario(seed, policy, silent_s=LEASE_S, faults=(cut,), calm_s=90.0)
            assert survive(one).head.state.gate.u == one.total_steps


def test_row_21_a_lost_reply_to_a_served_request_causes_no_second_result() -> None:
    """kind 3: the request was heard. The first reply to each is lost; and it is asked again while it is scored."""
    for seed in SEEDS:
        answered: set[object] = set()

        def judge(sender: str, to: str, message: m.Message, now: float, seen: set[object] = answered) -> float | None:
            if not isinstance(message, m.Scored | m.Ack) or (type(message), key(message)) in seen:
                return 0.0
            seen.add((type(message), key(message)))
            return None

        one = scenario(seed, resend_s=3.0, score_s=4.0)
        ring = survive(one, bent(judge))
        scored = [key(x) for x in arrived(ring, m.Scored)]
        asked = [key(x) for x in arrived(ring, m.Trajectory)]
        assert len(asked) > 2 * len(set(asked))
        assert len(scored) > len(set(scored))
        n_late = len(set(scored)) - len(lines(ring, Event.SCORED))  # of what was refunded at the end
        assert n_late <= len(lines(ring, Event.REFUND)) * one.n_samples
        assert len(lines(ring, Event.REFUSED, what="Scored")) == len(scored) - len(lines(ring, Event.SCORED))


def test_row_21_a_lost_reply_to_a_push_leaves_a_member_that_is_caught_up() -> None:
    """The member holds the weights, but the head does not know: it is fenced and pushed the same version again."""
    for seed in SEEDS:
        gone: list[m.PushDone] = []

        def judge(sender: str, to: str, message: m.Message, now: float, gone: list[m.PushDone] = gone) -> float | None:
            if sender == GENERATOR and isinstance(message, m.PushDone) and message.version == 2 and not gone:
                gone.append(message)
                return None
            return 0.0

        one = replace(scenario(seed, silent_s=1000.0), push_timeout_s=25.0)
        ring = survive(one, bent(judge))
        assert len(gone) == 1
        broken = lines(ring, Event.PUSH_BROKEN, name=GENERATOR)
        assert [line["version"] for line in broken] == [2]
        assert lines(ring, Event.MEMBER, name=GENERATOR, state="healthy")
        assert ring.end == DONE
