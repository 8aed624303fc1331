"""The invariants hold while the split of ranks changes, with actors and heads that die during the changes."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.split_planner import STAY, Decision, PlannerRules, RingFigures, SplitPlanner
from areal_bus.core.transitions.member_lifecycle import MemberLifecycle
from areal_bus.core.transitions.split_changes import SplitChanges
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario, draw, splitting
from tests.areal_bus.core.test_head import lines

N_SCHEDULES = 20  # a policy
KINDS = ("crash", "crash", "stop", "cut")
ROLES = (Role.LEARNER, Role.GENERATOR, Role.HEAD)


def changing(seed: int, policy: StalenessPolicy = StalenessPolicy.MASK, *, is_rough: bool = True) -> Scenario:
    """Up to three changes, and up to twelve more faults than the schedule of this seed has."""
    rng = random.Random(f"changing {seed}")
    plan = draw(seed, policy)
    more = [
        Fault(rng.choice(KINDS), rng.choice(ROLES), rng.randrange(3), rng.uniform(5, 200), rng.choice((1.0, 5.0, 20.0)))
        for _ in range(rng.randint(0, 12))
    ]
    faults = (*plan.faults, *more) if is_rough else ()
    sizes = {"n_generators": rng.randint(2, 4), "n_learners": rng.choice((1, 1, 2)), "total_steps": rng.choice((4, 8))}
    still: dict[str, Any] = {} if is_rough else {"p_lost": 0.0, "p_twice": 0.0, "p_push_fault": 0.0, "p_disk": 0.0}
    plan = replace(plan, **sizes, **still, n_rows=None, poison=frozenset(), p_error=0.0, p_unsampled=0.0, joins_s=())
    return splitting(replace(plan, faults=faults, calm_s=200.0 if faults else 0.0), rng)


def ring_of(plan: Scenario) -> Ring:
    ring = Ring(plan)
    ring.records = []
    outcome = ring.run()
    assert not outcome.violations, (plan.seed, plan.policy, outcome.violations[0])
    return ring


def run(plan: Scenario) -> Ring:
    ring = ring_of(plan)
    assert ring.end is not None
    assert ring.end.code == 0, (plan.seed, ring.end)
    return ring


def changes(ring: Ring) -> list[dict[str, Any]]:
    return [line for line in lines(ring, Event.SPLIT) if line["why"] == "change"]


def test_without_faults_a_change_undoes_nothing() -> None:
    """No prompt is admitted twice, none is trained again, and each change begins where the learners had come to."""
    for seed in range(N_SCHEDULES):
        ring = run(changing(seed, is_rough=False))
        uids = [line["uid"] for line in lines(ring, Event.ADMIT)]
        assert len(set(uids)) == len(uids), seed
        assert ring.witness.n_undone == 0
        assert len(lines(ring, Event.TERM)) == 1 + len(changes(ring))


@pytest.mark.slow
def test_evaluations_one_after_the_other_do_not_put_a_change_off() -> None:
    """A new one is due at each version, and takes several updates: the change follows one that is open."""
    for seed in range(N_SCHEDULES // 2):
        sizes = {"n_learners": 1, "n_generators": 3, "total_steps": 60, "eta": 4}
        plan = replace(changing(seed, is_rough=False), schedule=((3, 2),), evaluate_every=1, n_problems=6, **sizes)
        (change,) = changes(run(plan))
        assert change["version"] < 30, seed


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_the_invariants_hold_over_any_changes_that_a_planner_decides(
    policy: StalenessPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(7)

    def decide(self: SplitPlanner, step: int, figures: RingFigures | None, learners: int) -> Decision:
        return Decision(rng.choice(sorted(self.rules.generators_at))) if rng.random() < 0.5 else STAY

    monkeypatch.setattr(SplitPlanner, "decide", decide)
    n_changes = 0
    for seed in range(N_SCHEDULES):
        eta = random.Random(f"eta {seed}").randint(2, 5)
        plan = replace(draw(seed, policy), eta=eta, n_learners=1, n_generators=3, n_rows=None, joins_s=())
        rules = PlannerRules(
            every_steps=1, total_steps=plan.total_steps, eta=eta, generators_at={1: 3, 2: 2, 3: 1}, slots=plan.capacity
        )
        ring = ring_of(replace(plan, planner=rules, poison=frozenset(), calm_s=max(200.0, plan.calm_s)))
        assert all(line["learners"] >= 1 and line["generators"] >= 1 for line in changes(ring))
        n_changes += len(changes(ring))
    assert n_changes > N_SCHEDULES // 2


def nobody_is_misplaced(*_: object) -> str:
    return ""


def at_once(self: SplitChanges) -> bool:
    return self.state.change.is_handing_over


@pytest.mark.parametrize(
    ("owner", "rule", "broken", "invariant"),
    [(MemberLifecycle, "_misplaced", nobody_is_misplaced, "I11"), (SplitChanges, "_has_handed_over", at_once, "I4")],
)
def test_a_rule_that_is_left_out_is_detected(
    monkeypatch: pytest.MonkeyPatch, owner: type, rule: str, broken: Callable[..., object], invariant: str
) -> None:
    """Learners of an older split come in; the split changes before the checkpoint is written."""
    monkeypatch.setattr(owner, rule, broken)
    for seed in range(200):
        outcome = Ring(replace(changing(seed), patience_s=400.0)).run()
        if outcome.violations:
            assert outcome.violations[0].invariant == invariant
            return
    pytest.fail("no schedule of 200 notices it")
