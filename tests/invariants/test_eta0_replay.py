"""With eta > 0, too, the journal is the whole story: played once more through the head it gives the same decisions."""

import json
from typing import Any

import pytest

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Numbers, Scenario, ScenarioLengths, Tail
from tests.areal_bus.core import test_head
from tests.support.replaying import Differs, Replay, as_line

PARETO = ScenarioLengths(Tail.PARETO, 2.0, 1.2, 200)


def scenario(**changes: Any) -> Scenario:
    return test_head.scenario(**{"batch_size": 3, "total_steps": 12, "lengths": PARETO} | changes)


def recorded(plan: Scenario) -> list[dict[str, Any]]:
    """The head's journal of one schedule."""
    ring = Ring(plan)
    ring.records = []
    outcome = ring.run()
    assert not outcome.violations
    return [json.loads(json.dumps(as_line(record))) for _, record in ring.records]


def replay_of(plan: Scenario) -> Replay:
    return Replay(plan.rules, Numbers(plan.n_rows), capacity=plan.capacity)


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("eta", [0, 1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_a_journal_replays_to_the_same_decisions(policy: StalenessPolicy, eta: int, seed: int) -> None:
    rough = {"p_error": 0.1, "p_unsampled": 0.05, "joins_s": (1.0, 40.0)} if seed % 2 else {}
    plan = scenario(policy=policy, eta=eta, seed=seed, n_rows=60 if seed == 2 else None, **rough)
    lines = recorded(plan)
    replay = replay_of(plan)
    replay.run(lines)
    assert replay.n_compared == len(lines)
    assert replay.head.state.gate.u == len([line for line in lines if line["event"] == "update"]) > 0


def test_an_evaluation_is_replayed_with_its_figures() -> None:
    plan = scenario(n_problems=4)
    replay_of(plan).run(recorded(plan))


@pytest.mark.parametrize("event", ["admit", "lease", "batch", "publish", "trajectory", "ready"])
def test_a_decision_that_is_missing_or_changed_is_seen(event: str) -> None:
    plan = scenario()
    lines = recorded(plan)
    at = [i for i, line in enumerate(lines) if line["event"] == event][9]
    with pytest.raises(Differs):
        replay_of(plan).run(lines[:at] + lines[at + 1 :])
    key = {"batch": "clock", "publish": "version"}.get(event, "uid")
    changed = {**lines[at], key: lines[at][key] + 1}
    with pytest.raises(Differs):
        replay_of(plan).run([*lines[:at], changed, *lines[at + 1 :]])
