"""Rules that failing seeds have taught: the story that a seed told once is kept as a test of a few events.

Seeds change with every change of what they draw.
"""

import pytest

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.members.membership import MemberState
from areal_bus.core.parts.ledger import PromptState
from areal_bus.core.parts.push_queue import PushQueue
from areal_bus.core.transitions import member_lifecycle
from areal_bus.messages import Refund
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import draw
from areal_lab.staleness.soak import policy_of
from tests.areal_bus.core.parts.test_terms import GENERATOR, LEARNER, REWARD, begin, hold, leases, say, trained_head
from tests.areal_bus.core.test_head import end_of, head_with, joined, push_done, records, refused, scored, sent


def test_who_leaves_stays_until_its_samples_are_judged() -> None:
    """It has sampled all and keeps the trajectories, which a reward may lose."""
    head, _ = head_with(batch_size=1, eta=0, n_samples=2)
    say(head, GENERATOR, m.LeaveRequest())
    effects = [x for sample in (0, 1) for x in say(head, GENERATOR, m.Sampled(0, sample, 0, "", 3))]
    assert not head.state.members.by_name[GENERATOR].leased
    assert not sent(effects, m.Stop)
    effects = [x for sample in (0, 1) for x in say(head, REWARD, scored(0, sample))]
    assert [to for to, _ in sent(effects, m.Stop)] == [GENERATOR]


def test_an_older_attempt_given_back_frees_nothing_of_the_newer() -> None:
    """A generator that was taken for dead has the prompt again, under the next attempt, when its old word comes."""
    head, effects = head_with()
    (uid, *_) = leases(effects)
    head.requeue(GENERATOR, 1.0)
    assert leases(say(head, GENERATOR, m.Heartbeat(1, 0, ""), 1.0)) == {}
    push_done(head, LEARNER, 0)
    assert leases(push_done(head, GENERATOR, 0))[uid] == 1
    before = set(head.state.members.by_name[GENERATOR].leased)
    assert refused(say(head, GENERATOR, m.SampleFailed(int(str(uid)), 0, "", Refund.LOST_TIMELINE, "")))
    assert head.state.members.by_name[GENERATOR].leased == before


def test_problems_of_an_evaluation_end_where_they_are_sampled_when_their_lease_is_lost() -> None:
    """Else a generator that is heard again decodes them beside a share (eta = 0)."""
    head, _ = head_with(n_generators=1, n_problems=2)
    head.requeue(GENERATOR, 1.0)
    effects = say(head, GENERATOR, m.Heartbeat(1, 0, ""), 1.0)
    cancelled = [message for _, message in sent(effects, m.Cancel)]
    assert [(x.evaluation, x.uid) for x in cancelled] == [("before", 0), ("before", 1)]  # type: ignore[union-attr]


def test_a_push_that_a_member_has_completed_makes_it_healthy_no_second_time() -> None:
    """It joined again since then, and has put the weights away, when the echo of its word comes."""
    head, _ = head_with(n_generators=2, eta=2, batch_size=1, n_samples=1)
    say(head, LEARNER, m.BatchRequest(0))
    say(head, REWARD, scored(0, 0))
    say(head, LEARNER, m.UpdateDone(1, {}, "digest 1"))
    push_done(head, GENERATOR, 1)
    joined(head, GENERATOR, again=1)
    assert refused(push_done(head, GENERATOR, 1))
    assert head.state.members.by_name[GENERATOR].standing is MemberState.STALE


def test_a_push_that_nobody_answers_is_journalled_as_broken() -> None:
    head, _ = trained_head()
    push_done(head, LEARNER, 1)
    broken: list[dict[str, object]] = []
    now = 0.0
    while head.state.pushes.current is not None and now < 100:
        now += 4.0
        for name in (LEARNER, REWARD, GENERATOR):
            head.on(name, m.Heartbeat(0, None, ""), now)
        broken += records(head.tick(now), Event.PUSH_BROKEN)
        if broken:
            break
    assert [(line["name"], line["version"]) for line in broken] == [(GENERATOR, 1)]


def test_strangers_cost_a_bounded_memory() -> None:
    head, _ = head_with()
    for i in range(member_lifecycle.MOST_STRANGERS + 10):
        say(head, f"generator-{i + 9}.0", m.Heartbeat(1, None, ""))
    assert len(head.lifecycle._told) <= member_lifecycle.MOST_STRANGERS


def test_no_two_lives_of_a_head_number_a_push_or_a_view_alike() -> None:
    """A generator that hears of push 0 after push 7 would overlook it."""
    lives = [PushQueue(timeout_s=1.0, incarnation=life) for life in (0, 1)]
    begun = [one.begin(version=1, root="l", members=["g"], catch_up=False, now=0.0) for one in lives]
    assert begun[0].id != begun[1].id
    assert begun[0].view != begun[1].view


def test_failures_of_a_lost_timeline_do_not_end_the_job() -> None:
    head, _ = trained_head(total_steps=50)
    limit = 16
    for _ in range(limit - 1):
        uid = min(uid for uid, entry in head.state.ledger.open.items() if entry.state is PromptState.LEASED)
        attempt = head.state.ledger.open[uid].attempt
        end = end_of(say(head, GENERATOR, m.SampleFailed(uid, attempt, "", Refund.SAMPLING_ERROR, "no")))
        assert end is None
    begin(head, 1)
    hold(head, 1, learner="learner-0.1")
    held = [entry for entry in head.state.ledger.live() if entry.state is PromptState.LEASED]
    assert (
        end_of(say(head, GENERATOR, m.SampleFailed(held[0].uid, held[0].attempt, "", "sampling_error", "no"))) is None
    )


def test_who_left_and_died_is_not_let_go_in_its_next_life() -> None:
    head, _ = head_with()
    say(head, GENERATOR, m.LeaveRequest())
    assert not sent(joined(head, "generator-0.1"), m.Stop)
    push_done(head, LEARNER, 0)
    assert leases(push_done(head, "generator-0.1", 0))


def test_weights_of_a_lost_version_count_as_none() -> None:
    head, _ = trained_head()
    hold(head, 1)
    begin(head, 0)
    assert head.state.members.by_name[GENERATOR].version is None


# an echo of PushDone after a Join (three); a learner stopped twice at once; a slow generator too slow for its links;
# a witness that took verdicts of a refunded prompt for the head's own. The policy is that of the soak.
FAILED = (190549, 231848, 268016, 455741, 608116, 119530)


@pytest.mark.parametrize("seed", FAILED)
def test_a_seed_that_failed_once_holds_every_invariant(seed: int) -> None:
    assert not Ring(draw(seed, policy_of(seed))).run().violations
