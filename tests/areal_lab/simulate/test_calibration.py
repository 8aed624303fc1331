"""What a calibration finds in the journal of a ring of known speeds, and what it predicts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from areal_bus.config.sections import Config
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from areal_lab.simulate import __main__ as tool
from areal_lab.simulate.calibration import SLOWDOWNS, USUAL_SLOWDOWN, config_of, fit, measure
from areal_lab.simulate.cores import Cores, equal_share
from areal_lab.simulate.generator_history import Prefill, prefill_token_s, sample_key
from areal_lab.simulate.intervals import Prediction, Range, around, replicas, widened
from areal_lab.simulate.outcome import simulate_steady_state
from areal_lab.simulate.recording import record
from areal_lab.simulate.schedule import Schedule
from areal_lab.simulate.tables import compare_with_run, plus_minus
from areal_lab.simulate.work_time import Crowd, WorkClock, windows
from tests.areal_lab.simulate.recorded_ring import RecordedRing
from tools.run import Run

TRUE = Schedule(
    batch_size=16,
    n_samples=4,
    eta=1,
    policy=StalenessPolicy.MASK,
    on_update="keep",
    n_generators=2,
    slots=24,
    lengths=LengthLaw(60, 0.5),
    max_tokens=300,
    prompt_tokens=0,
    speeds=SpeedLaw(2000.0, 10.0, float("inf"), 0.0),
    train_tokens_per_s=3000.0,
    step_s=0.0,
    push_s=0.05,
    reward_s=0.02,
    cores=Cores(2, sample_s=0.003, generator_slowdown=0.15, learner_slowdown=0.04),
)
SETTINGS = {
    "data": {"batch_size": 16},
    "rollout": {"on_update": "keep", "max_concurrent_rollouts": 24},
    "gconfig": {"n_samples": 4, "max_new_tokens": 300},
}


def config(schedule: Schedule) -> Config:
    changed = {**SETTINGS["rollout"], "max_head_offpolicyness": schedule.eta}
    return Config.model_validate(SETTINGS | {"rollout": changed, "data": {"batch_size": schedule.batch_size}})


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Schedule], Run]:
    """Runs a ring of known speeds and writes its journal."""
    made: dict[str, Run] = {}

    def run(schedule: Schedule) -> Run:
        if repr(schedule) not in made:
            ring = RecordedRing(schedule, seed=1)
            ring.run(30 + schedule.eta)
            folder = tmp_path_factory.mktemp("runs") / "run"
            made[repr(schedule)] = Run(ring.write(folder, config(schedule)))
        return made[repr(schedule)]

    return run


# cores


def test_processes_share_the_cores_and_one_that_needs_little_gets_it_all() -> None:
    assert equal_share([1.0, 1.0], 2) == float("inf")
    assert equal_share([1.0, 1.0], 1) == 0.5
    assert equal_share([1.0, 1.0, 1.0], 2) == pytest.approx(2 / 3)
    assert equal_share([1.0, 1.0, 0.2], 2) == pytest.approx(0.9)
    assert equal_share([], 1) == float("inf")


def test_on_one_core_each_half_runs_at_half_speed_while_both_work() -> None:
    cores = Cores(1)
    assert cores.speeds(generators=1, trains=True, background=False).generator == 0.5
    assert cores.speeds(generators=1, trains=True, background=False).learner == 0.5
    assert cores.speeds(generators=1, trains=False, background=False).generator == 1.0
    assert cores.speeds(generators=0, trains=True, background=True).learner == 0.5
    on_gpu = Cores(1, generator=0.0)  # a generator that waits for it
    assert on_gpu.speeds(generators=4, trains=True, background=False).learner == 1.0
    idle = replace(TRUE, cores=Cores(2, generator=0.0, learner=0.0))
    assert idle.bound == replace(TRUE, cores=None).bound


def test_more_processes_than_cores_bring_no_more_than_all_cores_can_do() -> None:
    """Three busy processes on two cores: the sum of their core seconds is two a second."""
    schedule = replace(TRUE, n_generators=3, eta=2)
    outcome = simulate_steady_state(schedule, n_steps=40)
    tokens_per_core_s = 2 / outcome.tokens_per_s
    least = 1 / 3000 + (24 + 10) / 24 / 2000 + 0.003 / schedule.lengths.mean(300)
    assert tokens_per_core_s > least
    free = simulate_steady_state(replace(schedule, cores=None), n_steps=40)
    assert outcome.tokens_per_s < 0.8 * free.tokens_per_s


# calibration


@pytest.mark.parametrize(("eta", "n_generators"), [(0, 1), (1, 2), (2, 3)])
def test_a_calibration_finds_the_speeds_that_actors_would_have_alone(
    run_of: Callable[[Schedule], Run], eta: int, n_generators: int
) -> None:
    run = run_of(replace(TRUE, eta=eta, n_generators=n_generators))
    found = measure(run, config_of(run))
    assert found.cores is not None
    assert found.cores.n == 2
    assert found.cores.generator == pytest.approx(1.0, rel=0.02)
    assert found.cores.learner == pytest.approx(1.0, rel=0.02)
    assert found.cores.sample_s == pytest.approx(0.003, rel=0.05)
    assert found.train_tokens_per_s == pytest.approx(3000, rel=0.06)
    assert found.speeds.tokens_per_s(16) == pytest.approx(TRUE.speeds.tokens_per_s(16), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        {"eta": 4},
        {"n_generators": 1},
        {"n_generators": 3, "eta": 2},
        {"batch_size": 32},
        {"lengths": LengthLaw(120, 0.4)},
    ],
    ids=["eta", "split", "split and eta", "B", "lengths"],
)
def test_a_calibration_predicts_another_ring_on_the_same_cores(
    run_of: Callable[[Schedule], Run], change: dict[str, object]
) -> None:
    source, other = run_of(TRUE), run_of(replace(TRUE, **change))  # type: ignore[arg-type]
    config_there = config_of(other)
    seen = measure(other, config_there)
    lengths = TRUE.lengths if "lengths" not in change else LengthLaw(120, 0.4)
    found = compare_with_run(config_there, measure(source, config_of(source)), seen, n_steps=40, lengths=lengths)
    assert abs(found.error) < 0.1
    assert abs(found.lag_error) < 0.25


def shifted(line: dict[str, Any], ring: RecordedRing, n_updates: int) -> dict[str, Any]:
    """A line of a ring that went on after `ring` and its updates."""
    more = {"t": ring.now + 5, "wall": ring.now + 5, "version": n_updates, "step": n_updates, "uid": 1 << 20}
    return line | {key: line[key] + by for key, by in more.items() if key in line}


def write_changed(folder: Path, before: RecordedRing, after: RecordedRing, n_updates: int) -> Run:
    """The run of two rings, one after the other: generator 1 of the first one is learner 1 of the second one."""
    later = {name: [shifted(line, before, n_updates) for line in lines] for name, lines in after.lines.items()}
    change = {"event": "split", "why": "change", "t": before.now + 1, "wall": before.now + 1}
    before.lines["head-0"] += [change, *later["head-0"]]
    requests = [line for line in before.lines["generator-0"] if line["event"] == "request"]
    ended = {sample_key(line) for line in before.lines["generator-0"] if line["event"] == "completion"}
    rest = [line for line in requests if sample_key(line) not in ended]  # in flight at the change, and then cancelled
    aborted = {"event": "completion", "t": before.now + 2, "wall": before.now + 2, "n_tokens": 0, "finish": "abort"}
    before.lines["generator-0"] += [line | aborted for line in rest]
    for name in ("generator-0", "reward-0"):
        before.lines[name] += later[name]
    before.write(folder, config(after.schedule))
    text = "".join(json.dumps(line) + "\n" for line in later["learner-0"])
    for name in ("learner-0.1", "learner-1.1"):
        (folder / "journal" / f"{name}.jsonl").write_text(text)
    return Run(folder)


def test_of_a_run_whose_split_changed_only_the_longest_split_is_measured(tmp_path: Path) -> None:
    two = replace(TRUE, cores=replace(TRUE.cores, learners=2), n_generators=1) if TRUE.cores is not None else TRUE
    before, after, alone = RecordedRing(TRUE, seed=1), RecordedRing(two, seed=2), RecordedRing(two, seed=2)
    for ring, n_updates in ((before, 12), (after, 31), (alone, 31)):
        ring.run(n_updates)
    alone.lines["learner-1"] = alone.lines["learner-0"]
    where = write_changed(tmp_path / "changed", before, after, n_updates=12)
    seen, expected = (record(each, config(two)) for each in (where, Run(alone.write(tmp_path / "alone", config(two)))))
    assert (seen.n_learners, seen.n_generators, seen.n_updates) == (2, 1, expected.n_updates)
    assert seen.tokens_per_s == pytest.approx(expected.tokens_per_s)
    assert fit(seen).speeds.decode_tokens_per_s == pytest.approx(fit(expected).speeds.decode_tokens_per_s, rel=1e-3)
    (where.folder / "journal" / "learner-1.1.jsonl").rename(where.folder / "journal" / "learner-0.2.jsonl")
    with pytest.raises(ConfigError, match="or one for each change of the split"):
        record(where, config(two))


def test_a_prefilled_token_takes_the_same_time_in_a_prompt_and_after_an_update() -> None:
    rows = [(3, 0.0), (0, 700.0), (5, 90.0)]
    seen = [Prefill(n, tokens, (n * 24 + tokens) / 5000) for n, tokens in rows]
    assert prefill_token_s(seen, 24) == pytest.approx(1 / 5000)
    assert prefill_token_s([], 24) == 0.0


def test_a_second_without_a_core_is_no_work() -> None:
    spans = {"event": "spans", "s_generate": 0.8, "s_idle": 0.2, "cpu_s": 0.4}
    over = windows([spans | {"t": 1.0, "cpu_wait_s": 0.4}, spans | {"t": 2.0, "cpu_wait_s": 0.0}], "generator")
    assert [window.work_s for window in over] == pytest.approx([0.4, 0.8])
    clock = WorkClock(over, [window.rate for window in over])
    assert clock.between(0.5, 1.5) == pytest.approx(0.75)
    assert clock.between(1.5, 3.0) == pytest.approx(1.5)


def test_a_crowd_is_the_share_of_the_other_cores_that_is_busy() -> None:
    crowd = Crowd([(1.0, 1), (2.0, 1), (3.0, -1), (4.0, 1), (4.0, 1)], n_cores=3)
    assert [crowd.share(t) for t in (0.5, 1.5, 2.5, 3.5, 4.5)] == [0.0, 0.0, 0.5, 0.0, 1.0]
    assert crowd.mean_share(1.0, 3.0) == pytest.approx(0.25)


def test_a_prefill_on_busy_cores_is_slowed_down_as_decoding_is(run_of: Callable[[Schedule], Run]) -> None:
    """The simulation slows it down again: its speed alone is needed."""
    run = run_of(TRUE)
    seen, alone_s = record(run, config_of(run)), 24 / 5000
    crowded = fit(seen).crowded
    assert crowded > 0.8
    slowed = [Prefill(1, 0.0, alone_s / (1 - USUAL_SLOWDOWN * crowded))]
    found = fit(replace(seen, prompt_tokens=24, prefills=slowed))
    assert found.speeds.prefill_tokens_per_s == pytest.approx(5000, rel=0.1)


@pytest.mark.slow
def test_a_run_without_overlap_is_reported_and_its_slowdown_is_uncertain(
    run_of: Callable[[Schedule], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    in_turns, at_once = run_of(replace(TRUE, eta=0, n_generators=1)), run_of(TRUE)
    seen = record(in_turns, config_of(in_turns))
    assert fit(seen).shows_no_overlap
    assert not measure(at_once, config_of(at_once)).shows_no_overlap
    slowdowns = [one.cores.generator_slowdown for one in replicas(seen, 6) if one.cores is not None]
    assert len(set(slowdowns)) == 6
    assert all(SLOWDOWNS[0] <= one <= SLOWDOWNS[1] for one in slowdowns)
    for run, eta, warns in ((in_turns, 1, True), (in_turns, 0, False), (at_once, 1, False)):
        line = ["--from", str(run.folder), "--etas", str(eta), "--steps", "5", "--replicates", "0", "--json"]
        assert tool.main(line) == 0
        printed = capsys.readouterr().out
        assert bool(json.loads(printed)["warnings"]) == warns
        assert ("measure a run at eta 1 or more" in printed) == warns


# intervals


def test_an_interval_is_as_wide_as_its_repetitions_scatter() -> None:
    assert around(10.0, [9.0]) is None
    interval = around(10.0, [8.0, 10.0, 12.0])
    assert interval is not None
    assert (interval.low, interval.high) == pytest.approx((6.71, 13.29), abs=0.01)
    certain = around(10.0, [10.0, 10.0], model_error=0.1)
    assert certain is not None
    assert (certain.low, certain.high) == pytest.approx((8.36, 11.64), abs=0.01)


def test_an_interval_is_widened_by_the_cost_of_oversubscribed_cores() -> None:
    """Two generators and a learner that compute want three of two cores: two thirds of the speed at worst."""
    ratio = Cores(2).oversubscribed(generators=2)
    outcome = simulate_steady_state(TRUE, n_steps=4)
    found = Prediction(outcome, Range(12_000.0, 15_000.0), Range(0.5, 1.5))
    assert widened(found, ratio).tokens_per_s == Range(8_000.0, 15_000.0)
    assert widened(found, Cores(4).oversubscribed(generators=2)) == found
    assert widened(found, ratio).lag_mean == found.lag_mean
    assert plus_minus(10_000.0, Range(6_000.0, 11_000.0)) == "-40% +10%"
    assert plus_minus(10_000.0, Range(9_000.0, 11_000.0)) == "± 10%"


@pytest.mark.slow
def test_the_command_prints_intervals_and_cores_of_a_run(
    run_of: Callable[[Schedule], Run], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(run_of(TRUE).folder)
    line = ["--from", folder, "--split", "1+3", "--etas", "1", "--steps", "8", "--replicates", "3"]
    assert tool.main(line) == 0
    text = capsys.readouterr().out
    assert "cores      2: a busy generator uses 1.0" in text
    assert "± " in text
    rows = {}
    for cores in ("1", "2", "0"):
        assert tool.main([*line, "--cores", cores, "--json"]) == 0
        (rows[cores],) = json.loads(capsys.readouterr().out)["rows"]
    assert rows["1"]["tokens_per_s"] < 0.7 * rows["2"]["tokens_per_s"] < rows["0"]["tokens_per_s"]
    assert rows["2"]["interval"]["low"] < rows["2"]["tokens_per_s"] < rows["2"]["interval"]["high"]


def test_a_journal_without_cpu_times_is_planned_with_enough_cores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = RecordedRing(TRUE, seed=1)
    ring.run(20)
    for lines in ring.lines.values():
        for line in lines:
            for name in ("cpu_s", "cpu_wait_s", "cores"):
                line.pop(name, None)
    folder = ring.write(tmp_path / "run", config(TRUE))
    assert measure(Run(folder), config(TRUE)).cores is None
    line = ["--from", str(folder), "--etas", "1", "--steps", "8", "--replicates", "0"]
    assert tool.main(line) == 0
    assert "cores      enough for all actors" in capsys.readouterr().out
    assert tool.main([*line, "--cores", "0"]) == 0
    with pytest.raises(ConfigError, match="--cores needs a run whose journal has CPU times"):
        tool.main([*line, "--cores", "4"])
