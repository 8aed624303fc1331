"""Rules of the head, left out one by one: simulated rings (test_invariants.py, test_invariants_terms.py) or the head
machine (test_head_machine.py) notices each.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from areal_bus.core.effects import Effects
from areal_bus.core.events import Event
from areal_bus.core.members.membership import MemberState
from areal_bus.core.parts import gate, head_checkpoint
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, OpenPrompt
from areal_bus.core.parts.ledger import Ledger, PromptState
from areal_bus.core.parts.partial_rollouts import PartialRollouts
from areal_bus.core.parts.push_queue import PushQueue
from areal_bus.core.parts.terms import TermHistory, Terms
from areal_bus.core.rows import Curriculum, DataCursor
from areal_bus.core.state import HeadState, Phase
from areal_bus.core.transitions import batcher, rollouts
from areal_bus.core.transitions.batcher import Batcher
from areal_bus.core.transitions.phases import Phases
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.core.transitions.scheduler import Scheduler
from areal_bus.messages import Refund, Role, VerdictStatus

Sabotage = Callable[[pytest.MonkeyPatch], None]


# one rule or more of each invariant


def credits_return_early(patch: pytest.MonkeyPatch) -> None:
    take = Gate.take

    def wrong(self: Any, borns: Any) -> int:
        clock = take(self, borns)
        self.in_training = 0
        self._taken.clear()
        return clock

    patch.setattr(Gate, "take", wrong)


class Deaf:
    """Policies that no gate is of."""

    HOLD = DROP = MASK = PAPER = None


def everything_is_trained(patch: pytest.MonkeyPatch) -> None:
    runs = lambda *args: [(n, True) for _, n in args[1]]  # noqa: E731
    patch.setattr("areal_lab.staleness.simulator.learner.runs_under", runs)
    patch.setattr(batcher, "runs_under", runs)
    patch.setattr(Gate, "may_take", lambda *_: True)
    patch.setattr(Gate, "is_too_old", lambda *_: False)
    patch.setattr(gate, "StalenessPolicy", Deaf)


def trajectory_lines_are_changed(patch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    record = Effects.record

    def wrong(self: Any, event: Event, **fields: Any) -> None:
        record(self, event, **fields | (change(fields) if event is Event.TRAJECTORY else {}))

    patch.setattr(Effects, "record", wrong)


def no_mask_is_journalled(patch: pytest.MonkeyPatch) -> None:
    trajectory_lines_are_changed(patch, lambda _: {"n_masked": 0})


def a_token_too_many_is_counted(patch: pytest.MonkeyPatch) -> None:
    trajectory_lines_are_changed(patch, lambda fields: {"n_tokens": fields["n_tokens"] + 1})


def a_count_is_forgotten(patch: pytest.MonkeyPatch) -> None:
    def wrong(self: Any, entry: Any, state: Any) -> None:
        if state is not PromptState.REFUNDED:
            self.counts[entry.state] -= 1
        self.counts[state] += 1
        entry.state = state

    patch.setattr(Ledger, "_move", wrong)


def groups_younger_than_the_bound_are_dropped(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Gate, "is_too_old", lambda self, born: born < self.u)


def some_are_refunded_as_the_end_of_the_run(patch: pytest.MonkeyPatch) -> None:
    some_are_refunded(patch, Refund.END_OF_RUN)


def some_are_refunded_for_a_verdict_that_was_none(patch: pytest.MonkeyPatch) -> None:
    some_are_refunded(patch, Refund.REWARD_TIMEOUT)


def some_are_refunded(patch: pytest.MonkeyPatch, reason: Refund) -> None:
    scored = Rollouts.scored

    def wrong(self: Any, message: Any) -> None:
        scored(self, message)
        entry = self.ledger.open.get(message.uid)
        is_chosen = entry is not None and entry.state is not PromptState.TRAINING and message.uid % 7 == 3
        if is_chosen and not message.evaluation:
            self.refund(entry, reason)

    patch.setattr(Rollouts, "scored", wrong)


def results_are_counted_twice(patch: pytest.MonkeyPatch) -> None:
    deliver = Ledger.deliver

    def wrong(self: Any, scored: Any) -> Any:
        entry = self.open.get(scored.uid)
        if entry is not None and scored.sample in entry.scored and entry.state is PromptState.LEASED:
            return entry
        return deliver(self, scored)

    patch.setattr(Ledger, "deliver", wrong)


def tokens_are_stamped_anew(patch: pytest.MonkeyPatch) -> None:
    item = batcher.item

    def wrong(scored: Any, **more: Any) -> Any:
        made = item(scored, **more)
        spans = [[made.spans[-1][0], sum(n for _, n in made.spans)]]  # as of the last swap
        return type(made)(**{name: getattr(made, name) for name in made.__slots__} | {"spans": spans})

    patch.setattr(batcher, "item", wrong)


def older_attempts_count(patch: pytest.MonkeyPatch) -> None:
    of = Ledger._of
    known = lambda ledger, uid, attempt: ledger.open[uid].attempt if uid in ledger.open else attempt  # noqa: E731
    patch.setattr(Ledger, "_of", lambda self, uid, attempt: of(self, uid, known(self, uid, attempt)))


def nobody_is_pushed_to(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Publisher, "_those_in_step", lambda self, version: [])


def members_of_a_push_are_miscounted(patch: pytest.MonkeyPatch) -> None:
    publish = Publisher._publish
    patch.setattr(
        Publisher, "_publish", lambda self, version, *, n_members: publish(self, version, n_members=n_members + 1)
    )


def everybody_is_leased_to(patch: pytest.MonkeyPatch) -> None:
    alive = (MemberState.STALE, MemberState.HEALTHY)
    patch.setattr(
        HeadState,
        "eligible_generators",
        lambda self: [x for x in self.members.of(Role.GENERATOR, *alive) if x.version is not None],
    )


def a_group_is_ready_early(patch: pytest.MonkeyPatch) -> None:
    deliver = Ledger.deliver

    def wrong(self: Any, scored: Any) -> Any:
        entry = deliver(self, scored)
        if entry.state in (PromptState.LEASED, PromptState.SCORING) and not self.counts[PromptState.READY]:
            self.ready.add(entry)
            self._move(entry, PromptState.READY)
        return entry

    patch.setattr(Ledger, "deliver", wrong)


def the_youngest_groups_come_first(patch: pytest.MonkeyPatch) -> None:
    take = Ledger.take
    patch.setattr(Ledger, "take", lambda self, n, step: take(self, n, step)[::-1])


def slots_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Scheduler, "_fits", lambda *_, **__: True)


def errors_are_scored_zero(patch: pytest.MonkeyPatch) -> None:
    scored = Rollouts.scored

    def wrong(self: Any, message: Any) -> None:
        fields = {name: getattr(message, name) for name in message.__slots__}
        if message.status != VerdictStatus.VALUE:
            fields |= {"status": "value", "reward": 0.0}
        scored(self, type(message)(**fields))

    patch.setattr(Rollouts, "scored", wrong)


def nobody_catches_up(patch: pytest.MonkeyPatch) -> None:
    begin = Publisher._begin

    def wrong(self: Any, now: float) -> None:
        if self.gate.u > self.gate.v or self.gate.v == 0:
            begin(self, now)

    patch.setattr(Publisher, "_begin", wrong)


def one_miss_makes_hopeless(patch: pytest.MonkeyPatch) -> None:
    quarantine = PushQueue._quarantine

    def wrong(self: Any, name: str, push: Any, now: float, *, is_blamed: bool) -> None:
        for _ in range(self.patience):
            quarantine(self, name, push, now, is_blamed=True)

    patch.setattr(PushQueue, "_quarantine", wrong)


# what a term goes back to


def restart_ledger_with(**wrong: Callable[[Any, int], int]) -> Sabotage:
    """A ledger whose terms begin with something else than they should: field -> (ledger, right value) -> wrong one."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        restart = Ledger.restart

        def wrongly(self: Any, **right: int) -> None:
            restart(self, **{name: wrong.get(name, lambda _, x: x)(self, value) for name, value in right.items()})

        patch.setattr(Ledger, "restart", wrongly)

    return sabotage


uids_do_not_go_back = restart_ledger_with(next_uid=lambda ledger, uid: max(uid, getattr(ledger, "next_uid", 0)))
attempts_begin_again = restart_ledger_with(term=lambda *_: 0)


def open_prompts_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    begin_term = Rollouts.begin_term
    patch.setattr(Rollouts, "begin_term", lambda self, term, right: begin_term(self, term, replace(right, open=())))


def verdicts_of_lost_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    revive = head_checkpoint.revive
    patch.setattr(rollouts, "revive", lambda prompt, known, version, rules: revive(prompt, known, version + 100, rules))


def trained_prompts_are_opened_again(patch: pytest.MonkeyPatch) -> None:
    """Checkpoints are taken as if the batch that was just trained were still to come."""
    capture, take_batch, batch = HeadState.checkpoint, Batcher.take, list[OpenPrompt]()

    def take_and_remember(self: Any, n_groups: int) -> Any:
        before = {prompt.uid: prompt for prompt in capture(self.state, 0).open}
        taken = take_batch(self, n_groups)
        live = {entry.uid for entry in self.ledger.live()}
        batch[:] = [prompt for uid, prompt in before.items() if uid not in live]
        return taken

    def take_too_many(self: Any, version: int, **named: Any) -> HeadCheckpoint:
        right = capture(self, version, **named)
        return replace(right, open=(*batch, *right.open))

    patch.setattr(Batcher, "take", take_and_remember)
    patch.setattr(HeadState, "checkpoint", take_too_many)


def data_does_not_go_back(patch: pytest.MonkeyPatch) -> None:
    restart = DataCursor.restart

    def wrong(self: Any, *, position: int, again: Sequence[Any], state: str) -> None:
        restart(self, position=max(position, self.position), again=again, state=state)

    patch.setattr(DataCursor, "restart", wrong)


def pass_rates_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    go_to = Curriculum.go_to

    def wrong(self: Any, position: int, state: str) -> None:
        go_to(self, position, state)
        self._due.clear()

    patch.setattr(Curriculum, "go_to", wrong)


def samples_of_lost_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(TermHistory, "keeps", lambda *_: True)


def void_samples_are_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "_is_void", lambda *_: False)


def checkpoints_are_captured_late(patch: pytest.MonkeyPatch) -> None:
    """When the next update is finished, under the number of the one before; the last one is right."""
    is_due, capture, save = Terms.is_due, HeadState.checkpoint, Phases.save_checkpoint
    patch.setattr(Terms, "is_due", lambda self, version: version > 1 and is_due(self, version - 1))
    patch.setattr(HeadState, "checkpoint", lambda self, version, **named: capture(self, version - 1, **named))
    patch.setattr(Phases, "save_checkpoint", lambda self: save(self) if self.state.phase is Phase.TRAINING else None)


def leases_of_the_dead_are_forgotten(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "lose", lambda *_, **__: [])


def reports_of_lost_versions_are_kept(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PartialRollouts, "begin_term", lambda *_: None)


def open_prompts_cost_no_credit(patch: pytest.MonkeyPatch) -> None:
    begin_term = Rollouts.begin_term
    uncounted: dict[Gate, int] = {}

    def wrong(self: Any, term: int, right: HeadCheckpoint) -> dict[int, list[int]]:
        kept = begin_term(self, term, right)
        uncounted[self.gate] = len(kept)
        return kept

    patch.setattr(Rollouts, "begin_term", wrong)
    patch.setattr(Gate, "limit", property(lambda self: (self.eta + 1) * self.batch_size + uncounted.get(self, 0)))


def a_term_ends_no_lease(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "_release", lambda *_: None)
