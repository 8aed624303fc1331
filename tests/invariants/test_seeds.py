"""Rules that failing seeds have taught: what pins each passes, and fails when the rule is left out.

Seeds change with every change of what they draw; the story that a seed told once is kept as a test of a few events.
"""

from collections.abc import Callable

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
from tests.areal_bus.core import test_head
from tests.areal_bus.core.parts import test_terms
from tests.areal_bus.core.parts.test_terms import GENERATOR, LEARNER, REWARD, begin, hold, leases, say, trained_head
from tests.areal_bus.core.test_head import end_of, head_with, joined, push_done, records, refused, scored, sent
from tests.areal_bus.transport import test_receiver, test_rejections
from tests.invariants import left_out

# what had no test of its own


def who_leaves_stays_until_its_samples_are_judged() -> None:
    """It has sampled all and keeps the trajectories, which a reward may lose."""
    head, _ = head_with(batch_size=1, eta=0, n_samples=2)
    say(head, GENERATOR, m.LeaveRequest())
    effects = [x for sample in (0, 1) for x in say(head, GENERATOR, m.Sampled(0, sample, 0, "", 3))]
    assert not head.state.members.by_name[GENERATOR].leased
    assert not sent(effects, m.Stop)
    effects = [x for sample in (0, 1) for x in say(head, REWARD, scored(0, sample))]
    assert [to for to, _ in sent(effects, m.Stop)] == [GENERATOR]


def an_older_attempt_given_back_frees_nothing_of_the_newer() -> None:
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


def problems_of_an_evaluation_end_where_they_are_sampled_when_their_lease_is_lost() -> None:
    """Else a generator that is heard again decodes them beside a share (eta = 0)."""
    head, _ = head_with(n_generators=1, n_problems=2)
    head.requeue(GENERATOR, 1.0)
    effects = say(head, GENERATOR, m.Heartbeat(1, 0, ""), 1.0)
    cancelled = [message for _, message in sent(effects, m.Cancel)]
    assert [(x.evaluation, x.uid) for x in cancelled] == [("before", 0), ("before", 1)]  # type: ignore[union-attr]


def a_push_that_a_member_has_completed_makes_it_healthy_no_second_time() -> None:
    """It joined again since then, and has put the weights away, when the echo of its word comes."""
    head, _ = head_with(n_generators=2, eta=2, batch_size=1, n_samples=1)
    say(head, LEARNER, m.BatchRequest(0))
    say(head, REWARD, scored(0, 0))
    say(head, LEARNER, m.UpdateDone(1, {}, "digest 1"))
    push_done(head, GENERATOR, 1)
    joined(head, GENERATOR, again=1)
    assert refused(push_done(head, GENERATOR, 1))
    assert head.state.members.by_name[GENERATOR].standing is MemberState.STALE


def a_push_that_nobody_answers_is_journalled_as_broken() -> None:
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


def no_two_lives_of_a_head_number_a_push_or_a_view_alike() -> None:
    """A generator that hears of push 0 after push 7 would overlook it."""
    lives = [PushQueue(timeout_s=1.0, incarnation=life) for life in (0, 1)]
    begun = [one.begin(version=1, root="l", members=["g"], catch_up=False, now=0.0) for one in lives]
    assert begun[0].id != begun[1].id
    assert begun[0].view != begun[1].view


def failures_of_a_lost_timeline_do_not_end_the_job() -> None:
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


def who_left_and_died_is_not_let_go_in_its_next_life() -> None:
    head, _ = head_with()
    say(head, GENERATOR, m.LeaveRequest())
    assert not sent(joined(head, "generator-0.1"), m.Stop)
    push_done(head, LEARNER, 0)
    assert leases(push_done(head, "generator-0.1", 0))


def weights_of_a_lost_version_count_as_none() -> None:
    head, _ = trained_head()
    hold(head, 1)
    begin(head, 0)
    assert head.state.members.by_name[GENERATOR].version is None


PINNED: list[tuple[Callable[[], None], left_out.Sabotage]] = [  # what fails when the rule is left out
    (test_terms.test_nothing_is_pushed_before_the_learner_has_begun, left_out.whoever_is_learner_0_pushes),
    (
        test_terms.test_a_learner_that_chose_before_a_newer_head_checkpoint_was_durable_finds_its_own,
        left_out.room_is_made_on_a_learners_word,
    ),
    (a_push_that_a_member_has_completed_makes_it_healthy_no_second_time, left_out.an_echo_counts),
    (test_terms.test_going_back_discards_later_checkpoints, left_out.a_term_forgets_no_frontier),
    (test_terms.test_a_leaving_member_is_sent_rejoin_after_a_disconnect, left_out.only_learners_join_again),
    (who_leaves_stays_until_its_samples_are_judged, left_out.what_is_being_judged_holds_nobody),
    (who_left_and_died_is_not_let_go_in_its_next_life, left_out.who_leaves_is_remembered_by_its_place),
    (
        test_terms.test_the_slots_of_a_group_given_back_are_free_though_its_evaluation_is_over,
        left_out.slots_are_free_if_the_evaluation_is_open,
    ),
    (an_older_attempt_given_back_frees_nothing_of_the_newer, left_out.a_prompt_is_released_in_every_attempt),
    (
        test_terms.test_the_verdicts_of_an_open_evaluation_go_and_its_problems_are_asked_again,
        left_out.an_evaluation_is_forgotten,
    ),
    (problems_of_an_evaluation_end_where_they_are_sampled_when_their_lease_is_lost, left_out.nothing_is_cancelled),
    (
        test_head.test_the_root_is_notified_at_once_of_a_member_that_died_in_its_push,
        left_out.the_root_waits_for_the_deadline,
    ),
    (a_push_that_nobody_answers_is_journalled_as_broken, left_out.late_members_are_passed_over_in_silence),
    (no_two_lives_of_a_head_number_a_push_or_a_view_alike, left_out.numbers_begin_at_0_in_every_life),
    (test_receiver.test_a_prompt_is_blamed_for_deaths_alone_not_for_connections, left_out.every_loss_is_a_death),
    (
        test_receiver.test_a_member_that_does_not_receive_the_heads_heartbeat_is_dead_until_it_does,
        left_out.a_deaf_member_is_well,
    ),
    (test_terms.test_a_suspended_head_declares_no_member_dead, left_out.the_head_never_stands_still),
    (test_terms.test_a_silent_learner_is_never_lost, left_out.learners_may_be_lost),
    (
        test_head.test_a_generator_that_sampled_alone_has_all_its_room_on_reconnect,
        left_out.who_sampled_alone_stays_alone,
    ),
    (
        test_terms.test_after_two_deaths_a_prompt_is_sampled_alone_and_a_third_one_retires_it,
        left_out.poison_is_never_alone,
    ),
    (test_head.test_a_late_message_is_journalled_without_a_warning, left_out.any_uid_may_be_sampled),
    (test_rejections.test_a_verdict_of_a_term_of_the_future_is_not_acknowledged, left_out.terms_are_not_looked_at),
    (failures_of_a_lost_timeline_do_not_end_the_job, left_out.failures_are_counted_over_terms),
    (weights_of_a_lost_version_count_as_none, left_out.weights_stay_whatever_is_lost),
    (
        lambda: test_rejections.test_the_head_refuses_messages_that_a_members_role_may_not_send(
            "a verdict by a generator"
        ),
        left_out.anybody_says_anything,
    ),
    (
        test_head.test_a_lost_lease_goes_only_to_a_generator_that_holds_its_born_version,
        left_out.a_lost_lease_goes_to_anybody,
    ),
    (
        test_terms.test_a_request_for_a_batch_may_overtake_the_begin_of_its_term,
        left_out.requests_before_the_begin_are_refused,
    ),
    (test_terms.test_when_one_of_two_learners_comes_back_both_do, left_out.crews_are_not_broken),
    (test_terms.test_the_end_waits_for_the_learners_that_are_there_now, left_out.old_finishes_count),
]

# an echo of PushDone after a Join (three); a learner stopped twice at once; a slow generator too slow for its links;
# a witness that took verdicts of a refunded prompt for the head's own. The policy is that of the soak.
FAILED = (190549, 231848, 268016, 455741, 608116, 119530)


@pytest.mark.parametrize("seed", FAILED)
def test_a_seed_that_failed_once_holds_every_invariant(seed: int) -> None:
    assert not Ring(draw(seed, policy_of(seed))).run().violations


@pytest.mark.parametrize(("pin", "leave_out"), PINNED)
def test_a_rule_that_a_seed_has_taught_is_pinned(
    pin: Callable[[], None], leave_out: left_out.Sabotage, monkeypatch: pytest.MonkeyPatch
) -> None:
    pin()
    leave_out(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        pin()
