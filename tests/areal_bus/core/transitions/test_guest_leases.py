"""Leases of guests time out; those of the job's own generators do not, and are the measure."""

from dataclasses import replace

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.lease_failures import LEAST_S, TIMES, LeaseLimit
from areal_bus.messages import Refund
from tests.areal_bus.core.test_head import head_with, joined, push_done, records, scored, sent

G0, GUEST = "generator-0.0", "generator-66.0"
EVERYBODY = ("learner-0.0", "reward-0.0", G0, GUEST)


def visited(n_generators: int = 1, **changes: object) -> Head:
    """A ring of which a guest holds leases."""
    head, _ = head_with(n_generators, **({"batch_size": 4} | changes))
    joined(head, GUEST)
    push_done(head, "learner-0.0", 0)
    push_done(head, GUEST, 0)
    return head


def pass_time(head: Head, until_s: float, *, since_s: float = 0.0, works: bool = False) -> list[Effect]:
    """Everybody lives; the guest delivers nothing, nor does the own generator unless it `works`."""
    effects: list[Effect] = []
    for now in range(int(since_s) + 1, int(until_s) + 1, 5):
        for name in EVERYBODY:
            effects += head.on(name, m.Heartbeat(now, 0, ""), float(now))
        effects += head.tick(float(now))
        effects += done(head, float(now)) if works else []
    return effects


def held_by(head: Head, name: str) -> list[int]:
    return [entry.uid for entry in head.state.ledger.live() if entry.holder == name]


def done(head: Head, now: float) -> list[Effect]:
    """The own generator finishes what it holds."""
    effects: list[Effect] = []
    for uid in held_by(head, G0):
        entry = head.state.ledger.open[uid]
        for sample in entry.missing:
            effects += head.on("reward-0.0", scored(uid, sample, entry.attempt), now)
    return effects


@pytest.mark.parametrize("reports", [False, True])
def test_a_lease_of_a_guest_that_never_delivers_goes_to_others(reports: bool) -> None:
    head = visited()
    done(head, 1.0)
    held = held_by(head, GUEST)
    assert held
    for uid in held if reports else ():
        for sample in (0, 1):
            head.on(GUEST, m.Sampled(uid, sample, 0, "", 3), 1.0)
    assert not records(pass_time(head, LEAST_S, works=True), Event.UNSAMPLED)
    effects = pass_time(head, LEAST_S + 50, since_s=LEAST_S, works=True)
    lost = records(effects, Event.UNSAMPLED)
    assert {line["uid"] for line in lost} >= set(held)
    assert {line["holder"] for line in lost} == {GUEST}
    assert all(line["error"].startswith("timed out: the guest sent no complete result within 300 s") for line in lost)
    assert {to for to, prompt in sent(effects, m.Prompt) if prompt.uid in held} == {G0}  # type: ignore[union-attr]
    assert GUEST in {to for to, _ in sent(effects, m.Cancel)}


def test_a_guest_that_only_reports_sampled_holds_at_most_twice_its_capacity() -> None:
    head = visited(batch_size=64)
    done(head, 1.0)
    for _ in range(100):
        for entry in head.state.ledger.live():
            if entry.holder == GUEST:
                for sample in set(range(entry.n_samples)) - entry.noted:
                    head.on(GUEST, m.Sampled(entry.uid, sample, entry.attempt, "", 3), 1.0)
        done(head, 1.0)
    member = head.state.members.by_name[GUEST]
    assert len(member.unscored) == 2 * member.capacity
    assert len(held_by(head, GUEST)) * 2 == 2 * member.capacity


def test_a_lease_that_timed_out_and_that_no_other_generator_can_take_is_refunded() -> None:
    head = visited()
    held = held_by(head, GUEST)
    head.requeue(G0, 0.0)  # dead until it is heard
    effects = [x for now in range(1, int(LEAST_S) + 50) for x in head.on(GUEST, m.Heartbeat(now, 0, ""), float(now))]
    effects += head.tick(LEAST_S + 50)
    refunds = records(effects, Event.REFUND)
    assert {line["uid"] for line in refunds} >= set(held)
    assert {line["reason"] for line in refunds} == {Refund.SAMPLING_ERROR}


def test_the_limit_follows_the_longest_lease_of_the_jobs_own_generators() -> None:
    head = visited()
    effects = pass_time(head, 2 * LEAST_S)  # those of the own generator last as long
    assert not records(effects, Event.UNSAMPLED)
    done(head, 2 * LEAST_S)
    assert not records(pass_time(head, 0.9 * TIMES * 2 * LEAST_S, since_s=2 * LEAST_S), Event.UNSAMPLED)
    done(head, 0.9 * TIMES * 2 * LEAST_S)


def test_the_limit_is_five_minutes_where_nothing_took_longer() -> None:
    limit = LeaseLimit()
    assert limit.seconds([]) == LEAST_S
    limit.note(200.0)
    limit.note(10.0)
    assert limit.seconds([5.0]) == TIMES * 200.0
    assert limit.seconds([300.0]) == TIMES * 300.0


def test_a_problem_that_a_guest_keeps_goes_to_others() -> None:
    head, _ = head_with(1, n_problems=8)
    evaluation = head.state.evaluations.open
    assert evaluation is not None
    joined(head, GUEST)
    push_done(head, "learner-0.0", 0)
    push_done(head, GUEST, 0)
    kept = [uid for uid, holder in evaluation.leased.items() if holder == GUEST]
    assert kept

    def answer(now: float) -> None:
        for uid in [uid for uid, holder in evaluation.leased.items() if holder == G0]:
            for sample in evaluation.missing(uid):
                given = scored(uid, sample, evaluation.attempts[uid])
                head.on("reward-0.0", replace(given, evaluation=evaluation.name), now)

    for _ in range(8):
        answer(1.0)
    assert set(evaluation.leased) == set(kept)
    pass_time(head, LEAST_S + 10, works=True)
    assert set(evaluation.leased.values()) <= {G0}
    for _ in range(8):
        answer(LEAST_S + 20)
    assert not evaluation.failed
    assert {uid for uid, _ in evaluation.scored} == set(range(8))
