"""The planner in virtual time: near the clairvoyant schedule, and above fixed splits where lengths change."""

import json
from dataclasses import replace

import pytest

from areal_lab.adapt.__main__ import main
from areal_lab.adapt.compare import compare, run_planner, stay
from areal_lab.adapt.ring import AdaptiveRing
from areal_lab.adapt.scenario import ShiftingWorkload, draw
from areal_lab.simulate.ring import RingModel

SMALL = 90  # updates


@pytest.mark.slow
def test_the_planner_is_near_the_clairvoyant_schedule_and_above_every_fixed_split() -> None:
    found = compare(replace(draw(2), change_s=0.5))
    assert found.of_clairvoyant >= 0.95
    assert found.planner.throughput > max(found.fixed.values())
    assert found.clairvoyant >= max(found.fixed.values())
    assert len(found.planner.changes) > 2


def test_a_wrong_split_is_left_early() -> None:
    load = draw(2, n_updates=SMALL)
    steady = replace(load, phase_starts=(0, 10_000, 20_000))
    rings = {learners: AdaptiveRing(steady, learners=learners) for learners in steady.splits}
    fixed = {learners: ring.run_all(stay) for learners, ring in rings.items()}
    wrong = min(fixed, key=fixed.__getitem__)
    found = run_planner(steady, learners=wrong, every_steps=5)
    assert min(step for step in found.changes if step) <= 10
    last = found.changes[max(found.changes)]
    assert fixed[last] >= 0.95 * max(fixed.values())
    assert found.throughput > 1.2 * fixed[wrong]


def count(load: ShiftingWorkload, ring: RingModel) -> tuple[int, int]:
    """(groups, samples) that were trained."""
    groups = len(ring.batches) * load.schedule.batch_size
    return groups, groups * load.schedule.n_samples


def test_a_change_loses_no_sample_and_costs_its_time() -> None:
    load = draw(2, n_updates=30)
    still, moved = AdaptiveRing(load, learners=3), AdaptiveRing(load, learners=3)
    still.run_all(stay)
    moved.run_all(lambda step: {10: 4, 20: 3}.get(step))
    assert moved.n_changes == 2
    assert count(load, moved) == count(load, still)
    pause = moved.update_ends[10] - moved.update_ends[9]
    assert pause >= load.change_s
    assert not moved._queued
    assert moved.gate.in_training + moved.gate.live <= moved.gate.limit


@pytest.mark.slow
def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workloads", "1", "--first", "2", "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out)["workloads"]
    assert each["seed"] == 2
    assert each["adaptive"] > 0
    assert each["mean_lag"] > 0
