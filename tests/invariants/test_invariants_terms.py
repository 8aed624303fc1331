"""What a new term goes back to, in rings whose learner dies: each rule of it is left out once, and the witness notices.

The same schedules hold every invariant when nothing is left out. Checkpoints come every 2 or 3 versions, so that there
is something to undo.
"""

import contextlib
import random
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.rows import PassRateWindow
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario, ScenarioLengths, Tail
from areal_lab.staleness.simulator.sources import SimulatedSource
from tests.invariants import left_out as rule

N_SCHEDULES = 120


def schedule(seed: int) -> Scenario:
    """Long samples, slow verdicts, quick updates; a learner that dies two or three times between checkpoints."""
    rng = random.Random(f"terms {seed}")
    faults = [Fault("crash", Role.LEARNER, 0, rng.uniform(25, 110), 1.0) for _ in range(rng.randint(2, 3))]
    if rng.random() < 0.3:
        faults.append(Fault("crash", Role.GENERATOR, 0, rng.uniform(25, 110), 2.0))
    if rng.random() < 0.2:
        faults.append(Fault("crash", Role.HEAD, 0, rng.uniform(40, 110), 2.0))
    return Scenario(
        seed=seed, policy=tuple(StalenessPolicy)[seed % 4], batch_size=rng.choice((1, 2)), eta=rng.choice((1, 2, 3)),
        n_samples=2, total_steps=10, lengths=ScenarioLengths(Tail.LOG_NORMAL, 6.0, 1.0, 100), p_error=0.05,
        update_s=0.5, push_s=0.5, score_s=rng.choice((1.0, 5.0)), link_s=rng.choice((0.2, 1.0)),
        checkpoint_every=rng.choice((2, 3)), checkpoint_s=0.1, frontier_s=0.1, faults=tuple(faults), calm_s=120.0,
        tick_s=6.0, heartbeat_s=8.0, silent_s=25.0, report_tokens=rng.choice((0, 1)),
    )  # fmt: skip


def first_break(
    monkeypatch: pytest.MonkeyPatch, sabotage: rule.Sabotage, plan: Callable[[int], Scenario] = schedule
) -> str:
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


def with_sources(seed: int) -> Scenario:
    sources = SimulatedSource("a", 1.0, 2), SimulatedSource("b", 2.0, 3)
    return replace(schedule(seed), sources=sources, window=PassRateWindow(0.0, 1.0, 3))


def away_in_a_term(seed: int) -> Scenario:
    """The only generator dies with the learner, and is back when the new term has made the same version again."""
    plan = schedule(seed)
    at_s = next(fault.at_s for fault in plan.faults if fault.role is Role.LEARNER)
    faults = (Fault("crash", Role.LEARNER, 0, at_s, 1.0), Fault("crash", Role.GENERATOR, 0, at_s, 20.0))
    return replace(plan, n_generators=1, eta=3, faults=faults, report_tokens=1)


def generators_die(seed: int) -> Scenario:
    """Without their leases, the credits never return, until the gate is shut for good."""
    dead = tuple(Fault("crash", Role.GENERATOR, i, 8.0 + 12 * i, 2.0) for i in (0, 1))
    return replace(schedule(seed), batch_size=1, eta=1, faults=dead, calm_s=40.0)


@pytest.mark.parametrize(
    ("sabotage", "plan", "noticed"),
    [
        (rule.uids_do_not_go_back, schedule, "I3 "),
        (rule.attempts_begin_again, schedule, "I5 |I6 "),  # losses of the term before look like failures of this one
        (rule.open_prompts_are_forgotten, schedule, ".*it vanished with its term"),
        (rule.verdicts_of_lost_versions_are_kept, schedule, "I5 "),
        (rule.trained_prompts_are_opened_again, schedule, ".*has trained it"),
        (rule.data_does_not_go_back, schedule, "I4 "),
        (rule.pass_rates_are_forgotten, with_sources, "I4 "),
        (rule.samples_of_lost_versions_are_kept, schedule, "I5 "),
        (rule.void_samples_are_accepted, schedule, "I5 "),
        (rule.checkpoints_are_captured_late, schedule, ".*is undone by a term"),
        (rule.leases_of_the_dead_are_forgotten, generators_die, "I11 "),
        (rule.reports_of_lost_versions_are_kept, away_in_a_term, "I5 "),
        (rule.open_prompts_cost_no_credit, schedule, "I1 "),
        (rule.a_term_ends_no_lease, schedule, "I9 "),
    ],
)
def test_a_rule_of_terms_left_out_is_detected(
    monkeypatch: pytest.MonkeyPatch, sabotage: rule.Sabotage, plan: Callable[[int], Scenario], noticed: str
) -> None:
    if plan is not schedule:
        assert not any(Ring(plan(seed)).run().violations for seed in range(12))
    assert re.match(noticed, first_break(monkeypatch, sabotage, plan))
