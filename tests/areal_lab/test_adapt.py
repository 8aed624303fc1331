"""The planner in virtual time: near the clairvoyant schedule, and above fixed splits where lengths change."""

import json
from dataclasses import replace

import pytest

from areal_bus.core.planner.split_planner import SplitPlanner
from areal_lab.adapt.__main__ import main
from areal_lab.adapt.compare import compare, run_planner, stay
from areal_lab.adapt.ring import AdaptiveRing
from areal_lab.adapt.scenario import ShiftingWorkload, draw
from areal_lab.simulate.generator import PlannedGenerator
from areal_lab.simulate.ring import RingModel

SMALL = 90  # updates


def test_the_planner_is_near_the_clairvoyant_schedule_and_above_every_fixed_split() -> None:
    found = compare(replace(draw(2), change_s=0.5))
    assert found.of_clairvoyant >= 0.95
    assert found.adaptive > max(found.fixed.values())
    assert found.clairvoyant >= max(found.fixed.values())
    assert len(found.changes) > 2


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


def test_fewer_slots_in_force_keep_the_throughput_of_slow_learners_and_samples_end_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SplitPlanner, "decide", lambda *_: None)
    load = draw(0, n_updates=SMALL)
    slow = replace(load.schedule, train_tokens_per_s=load.schedule.train_tokens_per_s / 3)
    steady = replace(load, phase_starts=(0, 10_000, 20_000), schedule=slow, n_ranks=6)
    all_slots = run_planner(steady, learners=2, every_steps=5)
    fewer = run_planner(steady, learners=2, every_steps=5, slots_min=slow.n_samples)
    assert fewer.throughput >= 0.98 * all_slots.throughput
    assert fewer.mean_slots < slow.slots / 2 == all_slots.mean_slots / 2
    assert fewer.lease_s < 0.6 * all_slots.lease_s


def test_the_ring_leases_by_the_slots_in_force() -> None:
    load = draw(2, n_updates=30)
    ring = AdaptiveRing(load, learners=3)
    ring.set_slots(load.schedule.n_samples)
    most, lease = 0, ring._lease

    def watch(generator: PlannedGenerator) -> PlannedGenerator:
        nonlocal most
        leased = lease(generator)
        most = max(most, leased.load)
        return leased

    ring._lease = watch  # type: ignore[method-assign, assignment]
    ring.run_all(stay)
    assert most == load.schedule.n_samples


def test_a_split_without_a_generator_is_refused() -> None:
    load = draw(2, n_updates=30)
    with pytest.raises(ValueError, match="a learner and a generator"):
        AdaptiveRing(load, learners=3).change(load.n_ranks)


def test_the_command_prints_a_table_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--workloads", "1", "--first", "2", "--json"]) == 0
    (each,) = json.loads(capsys.readouterr().out)["workloads"]
    assert each["seed"] == 2
    assert each["adaptive"] > 0
    assert each["runs"].keys() == {"split", "eta", "slots", "both"}
