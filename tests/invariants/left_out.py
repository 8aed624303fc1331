"""Rules of the head, left out one by one: what tests/invariants/test_seeds.py breaks to see that somebody notices."""

from collections.abc import Callable
from typing import Any

import pytest

from areal_bus import messages as m
from areal_bus.core import head
from areal_bus.core.effects import Effects
from areal_bus.core.members.membership import Member, Membership, MemberState
from areal_bus.core.parts import push_queue
from areal_bus.core.parts.push_queue import PushQueue
from areal_bus.core.parts.terms import Terms
from areal_bus.core.transitions import rollouts
from areal_bus.core.transitions.member_lifecycle import MemberLifecycle
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.core.transitions.scheduler import Scheduler
from areal_bus.core.transitions.training import Training
from areal_bus.messages import Role

Sabotage = Callable[[pytest.MonkeyPatch], None]


def whoever_is_learner_0_pushes(patch: pytest.MonkeyPatch) -> None:
    learners = lambda self: self.members.of(Role.LEARNER, MemberState.HEALTHY, index=0)  # noqa: E731
    present = property(lambda self: next((x.name for x in learners(self)), None), lambda *_: None)
    patch.setattr(Publisher, "root", present, raising=False)


def room_is_made_on_a_learners_word(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any) -> list[int]:
        newest = sorted(self._sealed & self._saved)[-self._keep :]
        return self._drop(lambda other: other < newest[0]) if newest else []

    patch.setattr(Terms, "updated", wrong)


def only_learners_join_again(patch: pytest.MonkeyPatch) -> None:
    ask = MemberLifecycle._ask_again

    def wrong(self: Any, member: Member) -> None:
        if member.role is Role.LEARNER:
            ask(self, member)

    patch.setattr(MemberLifecycle, "_ask_again", wrong)


def slots_are_free_if_the_evaluation_is_open(patch: pytest.MonkeyPatch) -> None:
    unsampled = Rollouts.unsampled

    def wrong(self: Any, member: Member, message: m.SampleFailed) -> None:
        if message.evaluation:
            self.evaluations.named(message.evaluation)
        unsampled(self, member, message)

    patch.setattr(Rollouts, "unsampled", wrong)


def a_prompt_is_released_in_every_attempt(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, evaluation: str, uid: int, attempt: int) -> None:
        self.leased = {lease for lease in self.leased if lease[:2] != (evaluation, uid)}

    patch.setattr(Member, "release", wrong)


def an_evaluation_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "_end_evaluation", lambda self: setattr(self.evaluations, "open", None))


def nothing_is_cancelled(patch: pytest.MonkeyPatch) -> None:
    send = Effects.send
    patch.setattr(Effects, "send", lambda self, to, x: None if is_evaluations_cancel(x) else send(self, to, x))


def is_evaluations_cancel(message: m.Message) -> bool:
    return isinstance(message, m.Cancel) and bool(message.evaluation)


def the_root_waits_for_the_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "lose", lambda self, name: self.pushes.lose(name))


def late_members_are_passed_over_in_silence(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "expire", lambda self, now: self.pushes.expire(now))


def every_loss_is_a_death(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "clear_suspicion", lambda *_: None)


def who_sampled_alone_stays_alone(patch: pytest.MonkeyPatch) -> None:
    heard = Membership.heard

    def wrong(self: Any, name: str, now: float) -> Member:
        was_alone = self.by_name[name].alone
        member = heard(self, name, now)
        member.alone = was_alone
        return member

    patch.setattr(Membership, "heard", wrong)


def any_uid_may_be_sampled(patch: pytest.MonkeyPatch) -> None:
    sampled = Rollouts.sampled

    def wrong(self: Any, member: Member, message: m.Sampled) -> None:
        if message.uid < self.ledger.next_uid:
            sampled(self, member, message)

    patch.setattr(Rollouts, "sampled", wrong)


def terms_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "_check", lambda *_: None)
    patch.setattr(Rollouts, "_check_term", lambda *_: None)


def anybody_says_anything(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(head, "check_sender", lambda *_: None)


def numbers_begin_at_0_in_every_life(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(push_queue, "NUMBERS", 0)


def failures_are_counted_over_terms(patch: pytest.MonkeyPatch) -> None:
    begin_term = Rollouts.begin_term

    def wrong(self: Any, term: int, frontier: Any) -> dict[int, list[int]]:
        before = self.state.refunds_in_a_row
        kept = begin_term(self, term, frontier)
        self.state.refunds_in_a_row = before
        return kept

    patch.setattr(Rollouts, "begin_term", wrong)


def a_lost_lease_goes_to_anybody(patch: pytest.MonkeyPatch) -> None:
    lease_again = Scheduler._lease_again

    def wrong(self: Any, member: Member, lost: Any) -> bool:
        born, lost.born = lost.born, 0
        try:
            return lease_again(self, member, lost)
        finally:
            lost.born = born

    patch.setattr(Scheduler, "_lease_again", wrong)


def a_term_forgets_no_frontier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Terms, "later_than", lambda *_: [])


def requests_before_the_begin_are_refused(patch: pytest.MonkeyPatch) -> None:
    request = Training.request

    def wrong(self: Any, member: Member, message: m.BatchRequest) -> None:
        if self.terms.begun_by is not None:
            request(self, member, message)

    patch.setattr(Training, "request", wrong)


def a_deaf_member_is_well(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberLifecycle, "_hears", lambda *_: False)


def the_head_never_stands_still(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Membership, "slept", lambda *_: None)


def learners_may_be_lost(patch: pytest.MonkeyPatch) -> None:
    lost = property(lambda self: self.ready and self.standing is not MemberState.DEAD)
    patch.setattr(Member, "can_be_lost", lost)


def poison_is_never_alone(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("areal_bus.core.transitions.scheduler.POISON_THRESHOLD", 99)
    patch.setattr(rollouts, "POISON_THRESHOLD", 99)


def who_leaves_is_remembered_by_its_place(patch: pytest.MonkeyPatch) -> None:
    join_as = Membership.join

    def wrong(self: Any, message: m.Join, now: float) -> Member:
        was_leaving = any(other.leaving for other in self.of(Role(message.role), index=message.index))
        member = join_as(self, message, now)
        member.leaving = was_leaving
        return member

    patch.setattr(Membership, "join", wrong)


def weights_stay_whatever_is_lost(patch: pytest.MonkeyPatch) -> None:
    restart = Publisher.restart

    def wrong(self: Any, *args: Any, **more: Any) -> None:
        held = {member.name: member.version for member in self.members.of(Role.GENERATOR)}
        restart(self, *args, **more)
        for name, version in held.items():
            self.members.by_name[name].version = version

    patch.setattr(Publisher, "restart", wrong)


def crews_are_not_broken(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MemberLifecycle, "_send_back", lambda self, member, newcomer: None)


def old_finishes_count(patch: pytest.MonkeyPatch) -> None:
    break_crew = Terms.break_crew

    def wrong(self: Any) -> None:
        finished = dict(self.finished)
        break_crew(self)
        self.finished.update(finished)

    patch.setattr(Terms, "break_crew", wrong)


def what_is_being_judged_holds_nobody(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "holds_any", lambda *_: False)


def an_echo_counts(patch: pytest.MonkeyPatch) -> None:
    of = PushQueue._of

    def wrong(self: Any, id: int, name: str) -> Any:
        if self.current is not None:
            self.current.done.discard(name)
        return of(self, id, name)

    patch.setattr(PushQueue, "_of", wrong)
