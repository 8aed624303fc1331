"""What a new term goes back to, in rings whose learner dies: each rule of it is left out once, and the witness notices.

The same schedules hold every invariant when nothing is left out. Checkpoints come every 2 or 3 versions, so that there
is something to undo.
"""

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from areal_bus.core.parts import head_checkpoint
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, OpenPrompt
from areal_bus.core.parts.ledger import Ledger
from areal_bus.core.parts.partial_rollouts import PartialRollouts
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.parts.terms import TermHistory, Terms
from areal_bus.core.rows import Curriculum, DataCursor, PassRateWindow
from areal_bus.core.state import HeadState, Phase
from areal_bus.core.transitions import rollouts
from areal_bus.core.transitions.batcher import Batcher
from areal_bus.core.transitions.phases import Phases
from areal_bus.core.transitions.rollouts import Rollouts
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario, ScenarioLengths, Tail
from areal_lab.staleness.simulator.sources import SimulatedSource

N_SCHEDULES = 120

Sabotage = Callable[[pytest.MonkeyPatch], None]


def schedule(seed: int) -> Scenario:
    """Long samples, slow verdicts, quick updates; a learner that dies two or three times between checkpoints."""
    rng = random.Random(f"terms {seed}")
    faults = [Fault("crash", Role.LEARNER, 0, rng.uniform(25, 110), 1.0) for _ in range(rng.randint(2, 3))]
    if rng.random() < 0.3:
        faults.append(Fault("crash", Role.GENERATOR, 0, rng.uniform(25, 110), 2.0))
    if rng.random() < 0.2:
        faults.append(Fault("crash", Role.HEAD, 0, rng.uniform(40, 110), 2.0))
    return Scenario(
        seed=seed,
        policy=tuple(StalenessPolicy)[seed % 4],
        batch_size=rng.choice((1, 2)),
        eta=rng.choice((1, 2, 3)),
        n_samples=2,
        total_steps=10,
        lengths=ScenarioLengths(Tail.LOG_NORMAL, 6.0, 1.0, 100),
        p_error=0.05,
        update_s=0.5,
        push_s=0.5,
        score_s=rng.choice((1.0, 5.0)),
        link_s=rng.choice((0.2, 1.0)),
        checkpoint_every=rng.choice((2, 3)),
        checkpoint_s=0.1,
        frontier_s=0.1,
        faults=tuple(faults),
        calm_s=120.0,
        tick_s=6.0,
        heartbeat_s=8.0,
        silent_s=25.0,
        report_tokens=rng.choice((0, 1)),
    )


def first_break(monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage, plan: Callable[[int], Scenario] = schedule) -> str:
    """Leave out a rule and run schedules until one violates something: which invariant, and what it says.

    A schedule in which the head itself stops at it (ValueError) says nothing of the witness: the next one is run.
    """
    with monkeypatch.context() as patch:
        sabotage(patch)
        for seed in range(N_SCHEDULES):
            with contextlib.suppress(ValueError):
                outcome = Ring(plan(seed)).run()
                if outcome.violations:
                    return str(outcome.violations[0])
    return "none"


@pytest.mark.slow
def test_with_every_rule_in_place_the_same_schedules_hold_every_invariant() -> None:
    seen: Counter[str] = Counter()
    for seed in range(N_SCHEDULES):
        ring = Ring(schedule(seed))
        outcome = ring.run()
        assert not outcome.violations, (seed, outcome.violations[0])
        seen["terms"] += ring.witness.n_terms
        seen["undone"] += ring.witness.n_undone
        seen["ended well"] += outcome.end is not None and outcome.end.code == 0
    assert seen["terms"] > 2 * N_SCHEDULES, seen
    assert seen["undone"] > N_SCHEDULES, seen
    assert seen["ended well"] == N_SCHEDULES, seen


def restart_ledger_with(**wrong: Callable[[Any, int], int]) -> Sabotage:
    """A ledger whose terms begin with something else than they should: field -> (ledger, right value) -> wrong one."""

    def sabotage(patch: pytest.MonkeyPatch) -> None:
        restart = Ledger.restart

        def wrongly(self: Any, **right: int) -> None:
            restart(self, **{name: wrong.get(name, lambda _, x: x)(self, value) for name, value in right.items()})

        patch.setattr(Ledger, "restart", wrongly)

    return sabotage


def test_uids_that_do_not_go_back_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = restart_ledger_with(next_uid=lambda ledger, uid: max(uid, getattr(ledger, "next_uid", 0)))
    assert first_break(monkeypatch, go_on).startswith("I3 ")


def test_attempts_that_begin_again_in_a_new_term_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what a generator lost with the term before looks like a failure of this one."""
    assert first_break(monkeypatch, restart_ledger_with(term=lambda *_: 0)).startswith(("I5 ", "I6 "))


def test_open_prompts_that_a_term_forgets_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(patch: pytest.MonkeyPatch) -> None:
        begin_term = Rollouts.begin_term
        patch.setattr(Rollouts, "begin_term", lambda self, term, right: begin_term(self, term, replace(right, open=())))

    assert "it vanished with its term" in first_break(monkeypatch, forgets)


def test_verdicts_of_the_lost_timeline_that_are_kept_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(patch: pytest.MonkeyPatch) -> None:
        revive = head_checkpoint.revive
        patch.setattr(
            rollouts, "revive", lambda prompt, known, version, rules: revive(prompt, known, version + 100, rules)
        )

    assert first_break(monkeypatch, keeps).startswith("I5 ")


def test_a_term_that_reopens_prompts_trained_in_the_surviving_history_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def reopens(patch: pytest.MonkeyPatch) -> None:
        """Frontiers are taken as if the batch that was just trained were still to come."""
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

    assert "has trained it" in first_break(monkeypatch, reopens)


def test_data_that_does_not_go_back_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def goes_on(patch: pytest.MonkeyPatch) -> None:
        restart = DataCursor.restart

        def wrongly(self: Any, *, position: int, again: Sequence[Any], state: str) -> None:
            restart(self, position=max(position, self.position), again=again, state=state)

        patch.setattr(DataCursor, "restart", wrongly)

    assert first_break(monkeypatch, goes_on).startswith("I4 ")


def with_sources(seed: int) -> Scenario:
    sources = SimulatedSource("a", 1.0, 2), SimulatedSource("b", 2.0, 3)
    return replace(schedule(seed), sources=sources, window=PassRateWindow(0.0, 1.0, 3))


def test_a_curriculum_that_loses_its_pass_rates_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(patch: pytest.MonkeyPatch) -> None:
        go_to = Curriculum.go_to

        def wrongly(self: Any, position: int, state: str) -> None:
            go_to(self, position, state)
            self._due.clear()

        patch.setattr(Curriculum, "go_to", wrongly)

    for seed in range(12):
        assert not Ring(with_sources(seed)).run().violations
    assert first_break(monkeypatch, forgets, with_sources).startswith("I4 ")


def test_a_generator_that_keeps_samples_of_lost_versions_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(TermHistory, "keeps", lambda *_: True)

    assert first_break(monkeypatch, keeps).startswith("I5 ")


def test_an_older_terms_sample_that_is_accepted_beyond_the_base_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def accepts(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Rollouts, "_is_void", lambda *_: False)

    assert first_break(monkeypatch, accepts).startswith("I5 ")


def test_a_head_checkpoint_captured_after_its_version_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def takes_late(patch: pytest.MonkeyPatch) -> None:
        """When the next update is finished, under the number of the one before."""
        is_due, capture = Terms.is_due, HeadState.checkpoint
        patch.setattr(Terms, "is_due", lambda self, version: version > 1 and is_due(self, version - 1))
        patch.setattr(HeadState, "checkpoint", lambda self, version, **named: capture(self, version - 1, **named))
        patch.setattr(Phases, "save_checkpoint", capture_unless_closing(Phases.save_checkpoint))

    assert "is undone by a term" in first_break(monkeypatch, takes_late)


def capture_unless_closing(capture: Callable[[Any], None]) -> Callable[[Any], None]:
    """The last frontier is none of the late ones."""

    def unless_closing(self: Any) -> None:
        if self.state.phase is Phase.TRAINING:
            capture(self)

    return unless_closing


def test_leases_of_dead_members_that_are_not_requeued_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """I11: their credits never return, until the gate is shut for good."""

    def forgets(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Ledger, "lose", lambda *_, **__: [])

    def broken(seed: int) -> str:
        dead = tuple(Fault("crash", Role.GENERATOR, i, 8.0 + 12 * i, 2.0) for i in (0, 1))
        plan = replace(schedule(seed), batch_size=1, eta=1, faults=dead, calm_s=40.0)
        with monkeypatch.context() as patch:
            assert not Ring(plan).run().violations
            forgets(patch)
            return "".join(violation.invariant for violation in Ring(plan).run().violations)

    found = {broken(seed) for seed in range(8)}
    assert "I11" in found
    assert found <= {"", "I11"}


@pytest.mark.slow
def test_reports_of_lost_versions_that_are_handed_on_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def keeps(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(PartialRollouts, "begin_term", lambda *_: None)

    assert first_break(monkeypatch, lambda _: None, away_in_a_term) == "none"
    assert first_break(monkeypatch, keeps, away_in_a_term).startswith("I5 ")


def away_in_a_term(seed: int) -> Scenario:
    """The only generator dies with the learner, and is back when the new term has made the same version again."""
    plan = schedule(seed)
    at_s = next(fault.at_s for fault in plan.faults if fault.role is Role.LEARNER)
    faults = (Fault("crash", Role.LEARNER, 0, at_s, 1.0), Fault("crash", Role.GENERATOR, 0, at_s, 20.0))
    return replace(plan, n_generators=1, eta=3, faults=faults, report_tokens=1)


def test_open_prompts_that_cost_no_credit_in_the_new_term_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    def costs_nothing(patch: pytest.MonkeyPatch) -> None:
        begin_term = Rollouts.begin_term
        uncounted: dict[Gate, int] = {}

        def wrongly(self: Any, term: int, right: HeadCheckpoint) -> dict[int, list[int]]:
            kept = begin_term(self, term, right)
            uncounted[self.gate] = len(kept)
            return kept

        def limit(self: Gate) -> int:
            return (self.eta + 1) * self.batch_size + uncounted.get(self, 0)

        patch.setattr(Rollouts, "begin_term", wrongly)
        patch.setattr(Gate, "limit", property(limit))

    assert first_break(monkeypatch, costs_nothing).startswith("I1 ")


def test_a_lease_ended_by_a_term_without_a_message_keeps_its_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    def says_nothing(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(Rollouts, "_release", lambda *_: None)

    assert first_break(monkeypatch, says_nothing).startswith("I9 ")
