"""What a generator, a guest above all, may claim: each claim beyond a limit ends its own prompt and nothing else."""

import struct
from dataclasses import replace

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect, Record
from areal_bus.core.events import Event
from areal_bus.core.head import ALL_RECORDED
from areal_bus.core.parts.sample_limits import SampleLimits
from areal_bus.core.parts.stages import Stage
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Refund
from tests.areal_bus.core.test_head import head_with, joined, push_done, records, refused, scored, sent

G0, G1, REWARD = "generator-0.0", "generator-1.0", "reward-0.0"
GUEST = "generator-66.0"
STAGE = Stage(0, n_samples=2, max_new_tokens=240, max_tokens_per_mb=4096)
LIMITS = SampleLimits(vocabulary=100, positions=512, prompt=8, bounds_logps=True)


def of(segments: list[list[int]], *, uid: int = 0, token: int = 1, logp: float = -1.0) -> m.Scored:
    """A sample of one token id and one log-prob throughout."""
    n_ids, n_sampled = sum(map(sum, segments)), sum(n for _, n in segments)
    tokens = {"ids": struct.pack("<i", token) * n_ids, "logps": struct.pack("<f", logp) * n_sampled}
    return replace(scored(uid, 0), segments=segments, spans=[[0, n_sampled]] if n_sampled else [], **tokens)


OVER = {
    "no turn": of([]),
    "no prompt token": of([[0, 3]]),
    "no sampled token": of([[3, 0]]),
    "a token id of 2^31 - 1": of([[3, 3]], token=2**31 - 1),
    "the first token id over the vocabulary": of([[3, 3]], token=100),
    "400,000 tokens": of([[3, 400_000]]),
    "one token over the stage": of([[3, 241]]),
    "a longer prompt": of([[9, 3]]),
    "two turns": of([[3, 3], [1, 3]]),
    "a positive log-prob": of([[3, 3]], logp=0.5),
    "a log-prob whose weight overflows": of([[3, 3]], logp=-1e30),
    "a log-prob below -32": of([[3, 3]], logp=-32.5),
}


@pytest.mark.parametrize("what", OVER)
def test_a_sample_over_a_limit_is_refused(what: str) -> None:
    with pytest.raises(ImpossibleEvent, match="exceeds a limit"):
        LIMITS.check(OVER[what], STAGE)


def test_a_count_over_the_limit_of_one_turn_is_refused_and_keeps_its_lease() -> None:
    head, _ = head_with(limits=LIMITS)
    head.state.rules = head.rollouts.rules = replace(head.state.rules, stages=(STAGE,))
    lease = ("", 0, 0, 0)
    assert lease in head.state.members.by_name[G0].leased
    assert "241 sampled tokens" in refused(head.on(G0, m.Sampled(0, 0, 0, "", 241), 0.0))[0]
    assert lease in head.state.members.by_name[G0].leased
    effects = head.on(G0, m.Sampled(0, 0, 0, "", 240), 0.0)
    assert [line["n_tokens"] for line in records(effects, Event.SAMPLED)] == [240]


@pytest.mark.parametrize("logp", [0.0, -0.0, 1e-6, -1e-40, -31.9])
def test_a_sample_at_the_limits_is_accepted(logp: float) -> None:
    LIMITS.check(of([[8, 240]], token=99, logp=logp), STAGE)
    SampleLimits(positions=512).check(of([[200, 100], [12, 200]], token=2**30, logp=-200.0), STAGE)


@pytest.mark.parametrize("logp", [0.5, -1e30, -32.5])
def test_a_guests_log_probs_are_bounded_with_a_workflow_of_the_user_too(logp: float) -> None:
    limits = SampleLimits(bounds_guests=True)
    limits.check(of([[3, 3], [1, 3]], logp=logp), None)
    limits.check(of([[3, 3], [1, 3]], logp=-31.0), None, is_guests=True)
    with pytest.raises(ImpossibleEvent, match="log-probs are from -32 to 0"):
        limits.check(of([[3, 3], [1, 3]], logp=logp), None, is_guests=True)


def test_the_head_knows_whose_sample_it_checks() -> None:
    head, _ = head_with(limits=SampleLimits(bounds_guests=True))
    assert not refused(head.on(REWARD, of([[3, 3]], logp=-40.0), 0.0))
    assert [head.state.is_guests(name) for name in (G0, GUEST)] == [False, True]
    leased = head.state.ledger.open[1]
    leased.holder = GUEST
    forged = replace(of([[3, 3]], uid=1, logp=-40.0), generator=GUEST)
    assert "log-probs are from -32 to 0" in refused(head.on(REWARD, forged, 0.0))[0]


def refunds(effects: list[Effect]) -> list[tuple[int, str]]:
    return [(line["uid"], line["reason"]) for line in records(effects, Event.REFUND)]


@pytest.mark.parametrize("what", ["no prompt token", "a token id of 2^31 - 1", "a longer prompt"])
def test_a_sample_over_a_limit_ends_its_own_prompt_where_it_enters(what: str) -> None:
    head, _ = head_with(limits=LIMITS)
    effects = head.on(REWARD, OVER[what], 0.0)
    assert refunds(effects) == [(0, Refund.SAMPLING_ERROR)]
    assert "exceeds a limit" in refused(effects)[0]
    assert head.state.ledger.open.keys() == {1, 2}


def test_an_answer_over_a_limit_or_of_a_version_to_come_ends_its_problem_alone() -> None:
    head, _ = head_with(limits=LIMITS, n_problems=3)
    evaluation = head.state.evaluations.open
    assert evaluation is not None
    first, second = list(evaluation.leased)[:2]
    for uid, bad in ((first, OVER["400,000 tokens"]), (second, replace(of([[3, 3]]), spans=[[2**40, 3]]))):
        effects = head.on(REWARD, replace(bad, uid=uid, evaluation=evaluation.name), 0.0)
        assert refused(effects)
        assert not records(effects, Event.SCORED)
        assert [message for _, message in sent(effects, m.Cancel)] == [m.Cancel(uid, 0, evaluation.name)]
    assert evaluation.failed.keys() == {first, second}
    assert not evaluation.scored


def test_a_report_over_a_limit_is_not_handed_to_another_generator() -> None:
    head, _ = head_with(limits=LIMITS)
    bad = m.Partial(0, 0, 0, 0, [[3, 2]], [[0, 2]], struct.pack("<5i", 1, 1, 1, 2**31 - 1, 1), bytes(8))
    assert "exceeds a limit" in refused(head.on(G0, bad, 0.0))[0]
    assert len(head.state.partials) == 0
    assert not refused(head.on(G0, replace(bad, ids=bytes(20)), 0.0))
    assert len(head.state.partials) == 1


@pytest.mark.parametrize("asked", [2**62, 21, 20, 3])
def test_a_generator_is_leased_no_more_than_the_configs_capacity_whatever_it_asks_for(asked: int) -> None:
    head, _ = head_with(capacity=20)
    joined(head, GUEST, capacity=asked)
    assert head.state.members.by_name[GUEST].capacity == min(asked, 20)


def test_a_lease_of_this_term_is_not_given_back_for_a_lost_timeline() -> None:
    head, _ = head_with()
    lost = m.SampleFailed(0, 0, "", Refund.LOST_TIMELINE, "so it says")
    effects = head.on(G0, lost, 0.0)
    assert refunds(effects) == [(0, Refund.SAMPLING_ERROR)]
    assert not [x for _, x in sent(effects, m.Prompt) if isinstance(x, m.Prompt) and x.uid == 0]


def test_a_void_sample_that_claims_an_earlier_term_ends_its_prompt() -> None:
    head, _ = head_with()
    head.rollouts.term, head.rollouts._bases = 2, [(1, 0), (2, 0)]
    head.state.gate.u = 1
    effects = head.on(REWARD, replace(of([[1, 3]]), spans=[[1, 3]], term=0), 0.0)
    assert refunds(effects) == [(0, Refund.SAMPLING_ERROR)]


def test_joins_that_change_no_endpoint_are_answered_to_the_joining_member_alone() -> None:
    head, _ = head_with(n_generators=3)
    for _ in range(50):
        effects = joined(head, GUEST)
        assert {to for to, _ in sent(effects, m.PeerList)} == {GUEST}
    effects = head.on("reward-1.0", m.Join("reward-1.0", "reward", 1, 0, "there", 1, ""), 0.0)
    assert len(sent(effects, m.PeerList)) == 7


def events(effects: list[Effect]) -> list[Event]:
    return [x.event for x in effects if isinstance(x, Record)]


def test_a_guest_that_joins_again_unasked_is_refused_and_keeps_its_leases() -> None:
    head, _ = head_with(n_generators=3, batch_size=8)
    joined(head, GUEST)
    push_done(head, "learner-0.0", 0)
    push_done(head, GUEST, 0)
    held = set(head.state.members.by_name[GUEST].leased)
    assert held
    effects = [x for again in range(1, 5000) for x in joined(head, GUEST, again=again)]
    assert set(events(effects)) == {Event.REFUSED}
    assert len(effects) < ALL_RECORDED + 40
    assert head.state.members.by_name[GUEST].leased == held


def test_a_guest_that_was_asked_to_join_again_joins_once() -> None:
    head, _ = head_with()
    assert sent(head.on(GUEST, m.Heartbeat(1, None, ""), 0.0), m.Rejoin)  # as a stranger, of an earlier head
    joined(head, GUEST, again=1)
    assert Event.JOINED in events(joined(head, GUEST, again=2))  # its answer, after it had seen the new head by itself
    assert Event.JOINED not in events(joined(head, GUEST, again=3))
    head.on(GUEST, m.Disconnected(), 0.0)
    assert sent(head.on(GUEST, m.Heartbeat(1, None, ""), 0.0), m.Rejoin)
    assert Event.JOINED in events(joined(head, GUEST, again=4))
    assert Event.JOINED not in events(joined(head, GUEST, again=5))


def test_a_guest_that_left_does_not_come_back_before_its_next_incarnation() -> None:
    head, _ = head_with()
    assert sent(joined(head, GUEST) + head.on(GUEST, m.LeaveRequest(), 0.0), m.Stop)
    effects = [x for n in range(1, 5000) for x in joined(head, GUEST, again=n) + head.on(GUEST, m.LeaveRequest(), 0.0)]
    assert set(events(effects)) == {Event.REFUSED}
    assert len(events(effects)) < 3 * (ALL_RECORDED + 40)
    assert Event.JOINED in events(joined(head, "generator-66.1"))


def test_a_guest_that_hears_and_does_not_hear_in_turn_is_dead_once_in_silent_s() -> None:
    head, _ = head_with()
    joined(head, GUEST)
    silent_s = head.state.rules.silent_s
    beats = [m.Heartbeat(1, None, "", hears=bool(n % 2)) for n in range(2000)]
    effects = [x for n, beat in enumerate(beats) for x in head.on(GUEST, beat, n * 2 * silent_s / len(beats))]
    assert 0 < events(effects).count(Event.MEMBER) <= 6


def test_a_failure_is_recorded_once_of_each_incarnation() -> None:
    head, _ = head_with()
    effects = [x for _ in range(5000) for x in head.on(G0, m.Failure("out of memory"), 0.0)]
    assert events(effects).count(Event.FAILED) == 1
    assert len(events(effects)) < ALL_RECORDED + 40


def test_a_guest_gets_no_share_at_eta_0_and_no_share_waits_for_it() -> None:
    head, _ = head_with(2, eta=0)
    joined(head, GUEST)
    assert push_done(head, GUEST, 0)
    assert GUEST not in {x.name for x in head.state.eligible_generators()}
    assert {entry.holder for entry in head.state.ledger.open.values()} <= {G0, G1}
