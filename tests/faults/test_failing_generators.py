"""Rows 45 and 47: a generator fails at every prompt, for ever or for a while, while the others do good work."""

from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import Role
from areal_lab.staleness.simulator.scenario import Fault, Scenario
from tests.faults import ring as real
from tests.faults.simulated import ends_well, lines, play, scenario, when

EVER = 1e9
SEEDS = range(12)


def failing(seed: int, until_s: float, **changes: Any) -> Scenario:
    """Of three generators the first fails, from the start or from some moment on."""
    standard: dict[str, Any] = {
        "n_generators": 3, "total_steps": 10, "eta": seed % 4, "n_failing": 1, "fails_until_s": until_s,
        "fails_from_s": 20.0 * (seed % 2), "n_problems": 6, "calm_s": 0.0,
    }  # fmt: skip
    return scenario(seed, list(StalenessPolicy)[seed % 4], **(standard | changes))


@pytest.mark.slow
@pytest.mark.parametrize("until_s", [60.0, EVER])
def test_row_45_a_generator_that_fails_at_every_prompt_hurts_itself_alone(until_s: float) -> None:
    n_evicted = n_paused = 0
    for seed in SEEDS:
        ring, outcome = ends_well(failing(seed, until_s), failing=1)
        if until_s == EVER:
            _, without = play(failing(seed, 0.0, n_generators=2))
            assert outcome.seconds <= 1.5 * without.seconds + 60, "it costs little more than its absence"
        assert not lines(ring, Event.REFUND, reason="sampling_error"), f"seed {seed}"
        assert all(line["n_missing"] == 0 for line in lines(ring, Event.EVALUATION)), f"seed {seed}"
        gone = [line["name"] for line in lines(ring, Event.MEMBER, state="left")]
        paused = [line["name"] for line in lines(ring, Event.MEMBER) if line["why"].startswith("paused for")]
        n_evicted, n_paused = n_evicted + len(gone), n_paused + len(paused)
    assert n_paused > 0
    assert bool(n_evicted) == (until_s == EVER)


def test_row_45_two_of_three_that_fail_leave_the_third_to_train_all() -> None:
    for seed in SEEDS:
        ring, _ = ends_well(failing(seed, EVER, n_failing=2), failing=2)
        assert len(lines(ring, Event.UPDATE)) == 10


def test_row_45_a_prompt_at_which_every_generator_fails_ends_the_job_as_before() -> None:
    ring, outcome = play(failing(1, EVER, n_failing=3, n_problems=0, fails_from_s=0.0))
    assert outcome.end is not None
    assert outcome.end.code == 1
    assert "in a row ended without a reward; the last one: sampling_error: it cannot" in outcome.end.sentence
    assert not [line for line in lines(ring, Event.MEMBER) if line["why"].startswith("paused for")]


@pytest.mark.slow
def test_row_47_a_generator_that_fails_for_ever_is_evicted_for_good_and_the_others_train_all() -> None:
    for seed in range(4):
        ring, _ = ends_well(failing(seed, EVER, total_steps=150, update_s=10.0), failing=1)
        gone = [line for line in lines(ring, Event.MEMBER, state="left") if line["why"].startswith("evicted for good")]
        assert [line["name"] for line in gone] == ["generator-0.2"], f"seed {seed}"
        assert len(lines(ring, Event.UPDATE)) == 150


@pytest.mark.slow
def test_row_47_a_head_that_restarts_goes_on_without_a_generator_that_was_evicted_for_good() -> None:
    for seed in range(3):
        crash = Fault("crash", Role.HEAD, 0, 1100.0, 5.0)
        one = failing(seed, EVER, total_steps=150, update_s=10.0, faults=(crash,), calm_s=1110.0)
        ring, _ = ends_well(one, failing=1)
        assert when(ring, Event.MEMBER, name="generator-0.2", state="left") < 1100.0
        assert ring.disk.evicted == (0,)
        assert not lines(ring, Event.JOINED, name="generator-0.3")


@pytest.mark.soak
def test_row_47_a_real_generator_that_fails_for_ever_is_evicted_for_good_and_the_run_ends_well(tmp_path: Path) -> None:
    settings = "run.total_train_steps=120", "rollout.max_head_offpolicyness=1", "launch.max_restarts=1"
    ring = real.Ring(tmp_path, *settings, ranks=5)
    for name, text in (("failing", "generator-0"), ("pause_s", "0.02"), ("throttle", "0.02")):
        real.replace(tmp_path / name, text)
    with ring.started():
        gone = ring.wait_for("member", name="generator-0.1", state="left")
        real.replace(tmp_path / "throttle", "")
        ring.finish(timeout_s=600)
    ring.check_survived()
    assert gone["why"].startswith("evicted for good after 1 restart: ")
    assert ring.codes == [0] * len(ring.codes)
    assert [line["name"] for line in ring.lines("joined") if line["name"].startswith("generator-0.")] == [
        "generator-0.0", "generator-0.1",
    ]  # fmt: skip
    assert not ring.lines("refund", role="head", reason="sampling_error")
