"""The invariants hold while eta, the slots, and the split, change by decisions of a planner: here by any decisions."""

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.ring_model import RingFigures
from areal_bus.core.planner.split_planner import PlannerRules, SplitPlanner, SplitPrediction
from areal_bus.core.state import HeadState
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario, draw

N_SCHEDULES = 25  # a policy


def adapting(seed: int, policy: StalenessPolicy) -> Scenario:
    """The schedule of this seed, with an eta and slots that may change after every update."""
    plan = replace(draw(seed, policy), eta=random.Random(f"eta {seed}").randint(2, 5))
    rules = PlannerRules(
        every_steps=1,
        total_steps=plan.total_steps,
        eta=plan.eta,
        generators_at={},
        eta_min=1,
        slots=plan.capacity,
        slots_min=1,
    )
    return replace(plan, planner=rules)


def run(plan: Scenario) -> Ring:
    ring = Ring(plan)
    ring.records = []
    outcome = ring.run()
    assert not outcome.violations, (plan.seed, plan.policy, outcome.violations[0])
    return ring


@pytest.fixture
def any_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner decides by chance, so that every order of changes comes up."""
    rng = random.Random(7)

    def choose_eta(self: SplitPlanner, *_: Any) -> int:
        return rng.randint(1, self.rules.eta)

    def choose_slots(self: SplitPlanner, *_: Any) -> int:
        return rng.randint(1, self.rules.slots)

    def decide(self: SplitPlanner, step: int, figures: RingFigures | None, learners: int) -> SplitPrediction | None:
        choices = sorted(self.rules.generators_at)
        return SplitPrediction(rng.choice(choices), 1.0) if choices and rng.random() < 0.5 else None

    monkeypatch.setattr(SplitPlanner, "choose_eta", choose_eta)
    monkeypatch.setattr(SplitPlanner, "choose_slots", choose_slots)
    monkeypatch.setattr(SplitPlanner, "decide", decide)


@pytest.mark.usefixtures("any_decision")
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_the_invariants_hold_over_changes_of_eta_and_slots_and_deaths(policy: StalenessPolicy) -> None:
    n_terms, n_changes = 0, Counter[str]()
    for seed in range(N_SCHEDULES):
        ring = run(adapting(seed, policy))
        changes = [record.fields for _, record in ring.records or () if record.event is Event.ADAPT]
        n_changes.update(what for line in changes for what in ("eta", "slots") if what in line)
        n_terms += ring.witness.n_terms - 1
    assert min(n_changes["eta"], n_changes["slots"]) > N_SCHEDULES // 2
    assert n_terms > 5  # also a term restores the eta and the slots of its version


@pytest.mark.usefixtures("any_decision")
def test_the_planner_may_change_the_split_and_eta_in_one_run() -> None:
    n_splits = 0
    for seed in range(N_SCHEDULES):
        plan = replace(adapting(seed, StalenessPolicy.MASK), n_learners=1, n_generators=3, n_rows=None, joins_s=())
        assert plan.planner is not None
        planner = replace(plan.planner, generators_at={1: 3, 2: 2, 3: 1})
        ring = run(replace(plan, planner=planner, poison=frozenset(), calm_s=max(200.0, plan.calm_s)))
        changes = [record.fields for _, record in ring.records or () if record.event is Event.SPLIT]
        n_splits += sum(line["why"] == "change" for line in changes)
        assert all(line["learners"] >= 1 and line["generators"] >= 1 for line in changes)
    assert n_splits > N_SCHEDULES // 2


@pytest.mark.usefixtures("any_decision")
def test_a_gate_that_forgets_the_eta_in_force_breaks_I1(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(self: Gate) -> int:
        return (self.eta + 1) * self.batch_size

    monkeypatch.setattr(Gate, "limit", property(limit))
    found = [Ring(adapting(seed, StalenessPolicy.MASK)).run().violations for seed in range(N_SCHEDULES)]
    assert any(violation.invariant == "I1" for violations in found for violation in violations)


@pytest.mark.usefixtures("any_decision")
def test_a_scheduler_that_forgets_the_slots_in_force_breaks_I9(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadState, "most_leased", property(lambda self: None))
    found = [Ring(adapting(seed, StalenessPolicy.MASK)).run().violations for seed in range(N_SCHEDULES)]
    assert any(violation.invariant == "I9" for violations in found for violation in violations)
