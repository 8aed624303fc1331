"""The invariants hold while the split changes by decisions of a planner: here by any decisions."""

import random
from dataclasses import replace

import pytest

from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.split_planner import STAY, Decision, PlannerRules, RingFigures, SplitPlanner
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import draw

N_SCHEDULES = 25  # a policy


@pytest.fixture
def any_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    """The planner decides by chance, so that every order of changes comes up."""
    rng = random.Random(7)

    def decide(self: SplitPlanner, step: int, figures: RingFigures | None, learners: int) -> Decision:
        return Decision(rng.choice(sorted(self.rules.generators_at))) if rng.random() < 0.5 else STAY

    monkeypatch.setattr(SplitPlanner, "decide", decide)


@pytest.mark.usefixtures("any_decision")
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_the_invariants_hold_over_changes_of_the_split_that_a_planner_wants(policy: StalenessPolicy) -> None:
    n_splits = 0
    for seed in range(N_SCHEDULES):
        eta = random.Random(f"eta {seed}").randint(2, 5)
        plan = replace(draw(seed, policy), eta=eta, n_learners=1, n_generators=3, n_rows=None, joins_s=())
        rules = PlannerRules(
            every_steps=1, total_steps=plan.total_steps, eta=eta, generators_at={1: 3, 2: 2, 3: 1}, slots=plan.capacity
        )
        ring = Ring(replace(plan, planner=rules, poison=frozenset(), calm_s=max(200.0, plan.calm_s)))
        ring.records = []
        outcome = ring.run()
        assert not outcome.violations, (seed, policy, outcome.violations[0])
        changes = [record.fields for _, record in ring.records if record.event is Event.SPLIT]
        n_splits += sum(line["why"] == "change" for line in changes)
        assert all(line["learners"] >= 1 and line["generators"] >= 1 for line in changes)
    assert n_splits > N_SCHEDULES // 2
