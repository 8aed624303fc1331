"""areal_lab.simulate in virtual time: properties of any ring, closed forms, and the throughput of a recorded run."""

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.config.sections import Config
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import ConfigError
from areal_lab.ring.workload import LengthLaw, SpeedLaw
from areal_lab.simulate import __main__ as tool
from areal_lab.simulate import calibration, recording
from areal_lab.simulate.cores import Cores
from areal_lab.simulate.generator import PlannedGenerator, PlannedSample
from areal_lab.simulate.outcome import simulate
from areal_lab.simulate.ring import RingModel
from areal_lab.simulate.schedule import ObservedLengths, Schedule

SIZES: dict[str, Any] = {"batch_size": 8, "n_samples": 4, "eta": 1, "n_generators": 3, "slots": 8}
BASE = Schedule(
    **SIZES,
    policy=StalenessPolicy.MASK,
    on_update="recompute",
    lengths=LengthLaw(60.0, 0.8),
    max_tokens=300,
    prompt_tokens=20,
    speeds=SpeedLaw(decode_tokens_per_s=500.0, half_slots=4.0, prefill_tokens_per_s=5000.0, update_s=0.1),
    train_tokens_per_s=1200.0,
    step_s=0.2,
    push_s=0.3,
    reward_s=0.05,
)
STEPS = 12

BUSY, SLOWDOWN = st.floats(0, 1.2), st.floats(0, 0.3)
rings = st.builds(
    Schedule,
    batch_size=st.integers(1, 6),
    n_samples=st.integers(1, 4),
    eta=st.integers(0, 5),
    policy=st.sampled_from(StalenessPolicy),
    on_update=st.sampled_from(["recompute", "keep", "drain"]),
    n_generators=st.integers(1, 4),
    slots=st.integers(4, 9),
    lengths=st.builds(LengthLaw, st.floats(1, 60), st.floats(0, 1.5)),
    max_tokens=st.integers(1, 200),
    prompt_tokens=st.integers(0, 50),
    speeds=st.builds(SpeedLaw, st.floats(10, 5000), st.floats(0, 40), st.floats(100, 5000), st.floats(0, 3)),
    train_tokens_per_s=st.floats(10, 5000),
    step_s=st.floats(0, 2),
    push_s=st.floats(0, 4),
    reward_s=st.floats(0, 2),
    cores=st.none() | st.builds(Cores, st.integers(1, 4), BUSY, BUSY, st.integers(1, 2), st.floats(0, 0.05), SLOWDOWN),
)


# any ring


@settings(max_examples=80, deadline=None)
@given(rings)
def test_any_ring_accounts_for_all_within_the_bounds_of_its_halves_and_its_policy(schedule: Schedule) -> None:
    ring = RingModel(schedule)
    ring.run(STEPS)
    trained = sum(batch.n_tokens for batch in ring.batches)
    most = schedule.n_generators * schedule.speeds.tokens_per_s(schedule.slots) * ring.now * (1 + 1e-6)
    assert trained <= most
    assert ring.now >= (STEPS * schedule.step_s + trained / schedule.train_tokens_per_s) * (1 - 1e-9)

    sampled = sum(generator.n_tokens for generator in ring.generators)
    waiting = sum(group.n_tokens for _, _, group in ring._ready) + sum(x.n_tokens for x in ring._groups.values())
    training = sum(group.n_tokens for group in ring._training[1]) if ring._training else 0
    count = ring.count
    assert sampled == count.trained + count.masked + count.dropped + waiting + training
    assert len(ring._groups) + len(ring._ready) == ring.gate.live
    assert sampled + sum(generator.live_tokens() for generator in ring.generators) <= most

    if schedule.policy is not StalenessPolicy.PAPER:
        assert max(batch.max_lag for batch in ring.batches) <= schedule.eta
    assert ring.count.masked == 0 or schedule.policy is StalenessPolicy.MASK
    assert ring.count.dropped == 0 or schedule.policy is StalenessPolicy.DROP
    if schedule.on_update == "drain":
        assert all(len(one.spans) == 1 for _, _, group in ring._ready for one in group.done)


@settings(max_examples=20, deadline=None)
@given(rings)
def test_a_ring_with_one_seed_is_reproducible(schedule: Schedule) -> None:
    first, again = RingModel(schedule, seed=3), RingModel(schedule, seed=3)
    first.run(STEPS)
    again.run(STEPS // 2)
    again.run(STEPS)
    assert first.batches == again.batches


@pytest.mark.slow
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_more_eta_is_never_slower_beyond_the_noise(policy: StalenessPolicy) -> None:
    for speed in (400.0, 1200.0, 4000.0):
        rates = [
            simulate(
                replace(BASE, eta=eta, policy=policy, train_tokens_per_s=speed), n_steps=90, n_settle=20
            ).tokens_per_s
            for eta in (0, 1, 2, 4, 8)
        ]
        assert all(after > 0.97 * before for before, after in itertools.pairwise(rates)), (speed, rates)


# closed forms


@pytest.mark.parametrize(("n_generators", "slots"), [(1, 32), (2, 16), (3, 16), (4, 4), (3, 5)])
def test_eta_0_is_the_synchronous_schedule(n_generators: int, slots: int) -> None:
    """A step: the largest share is sampled in waves of equal lengths, scored, trained, pushed and swapped in."""
    length, schedule = 50, replace(BASE, eta=0, lengths=LengthLaw(50, 0), n_generators=n_generators, slots=slots)
    speeds, groups = schedule.speeds, math.ceil(schedule.batch_size / n_generators)
    samples = groups * schedule.n_samples
    waves = [min(slots, samples - first) for first in range(0, samples, slots)]
    # a prompt whose samples fall into two waves is read again when none of them is live any more
    read = sum(len({i // schedule.n_samples for i in range(w * slots, w * slots + n)}) for w, n in enumerate(waves))
    sampling_s = speeds.prefill_s(read * schedule.prompt_tokens) + sum(length * speeds.step_s(n) for n in waves)
    n_tokens = schedule.batch_size * schedule.n_samples * length
    training_s = schedule.training_s(n_tokens, schedule.batch_size)
    step_s = sampling_s + schedule.reward_s + training_s + schedule.push_s + speeds.update_s
    outcome = simulate(schedule, n_steps=6, n_settle=1)
    # between updates lies what follows one: push, swap, which stands at the head of the next sampling
    assert n_tokens / outcome.tokens_per_s == pytest.approx(step_s, rel=1e-6)
    assert outcome.learner_waits == pytest.approx(1 - training_s / step_s, abs=1e-6)
    assert outcome.lag_max == 0


def test_a_slow_learner_is_the_bound_and_its_samples_are_eta_old() -> None:
    outcome = simulate(replace(BASE, eta=3, train_tokens_per_s=100.0), n_steps=40, n_settle=12)
    assert outcome.learner_waits < 0.01
    assert outcome.lag_mean > 2.5
    schedule = replace(BASE, train_tokens_per_s=100.0)
    assert outcome.tokens_per_s == pytest.approx(schedule.bound, rel=0.05)


def test_slow_generators_are_the_bound() -> None:
    schedule = replace(
        BASE, eta=8, train_tokens_per_s=1e5, step_s=0.0, on_update="keep", speeds=replace(BASE.speeds, update_s=0.0)
    )
    outcome = simulate(schedule, n_steps=120, n_settle=30)
    assert outcome.slots_used > 0.97
    assert outcome.tokens_per_s == pytest.approx(schedule.generation_alone, rel=0.05)


def test_spans_are_split_where_the_versions_change() -> None:
    schedule = replace(
        BASE, on_update="keep", prompt_tokens=0, speeds=SpeedLaw(10.0, 0.0, 1.0, 0.0)
    )  # 10 tokens a second
    generator = PlannedGenerator(schedule, 0)
    generator.lease([PlannedSample(0, 40)])
    for version, at in ((1, 1.0), (2, 1.5), (3, 3.0)):
        generator.advance(at)
        assert generator.update(version)
    assert generator.next_end() == pytest.approx(4.0)
    generator.advance(4.0)
    (sampled,) = generator.collect()
    assert sampled.spans == [[0, 10], [1, 5], [2, 15], [3, 10]]


# a run


def test_a_line_is_fitted_to_points_and_is_never_below_0() -> None:
    assert calibration.fit_line([(1, 3, 1), (2, 5, 2), (4, 9, 1)]) == pytest.approx((1, 2))
    assert calibration.fit_line([(2, 6, 1), (2, 6, 1)]) == pytest.approx((0, 3))
    assert calibration.fit_line([(1, 5, 1), (2, 4, 1)]) == pytest.approx((0, 3))  # no slope shows
    assert calibration.fit_line([(1, 2, 1), (2, 9, 1), (3, 1, 1), (4, 9, 1)]) == pytest.approx((0, 2.1))
    assert calibration.fit_line([(1, 1, 1), (2, 4, 1)])[0] >= 0


IDS: dict[str, Any] = {"sample": 0, "attempt": 0}
HEAD = [
    {"event": "batch", "t": 10.0, "step": 0},
    {"event": "scored", "wall": 9.5, "t": 9.5, "uid": 1} | IDS,
    {"event": "update", "t": 12.0, "version": 1, "n_tokens": 100},
    {"event": "batch", "t": 12.0, "step": 1},
    {"event": "push", "t": 12.1, "version": 1},
    {"event": "publish", "t": 12.6, "version": 1},
    {"event": "update", "t": 15.0, "version": 2, "n_tokens": 200},
    {"event": "push", "t": 15.1, "version": 2},
]
COMPLETIONS = [
    {"event": "completion", "t": t, "wall": t, "uid": uid, "n_tokens": 7, "finish": finish} | IDS
    for t, uid, finish in ((9.3, 1, "stop"), (9.4, 2, "abort"))
]
RECEIVED = {"event": "pushed", "t": 9.5, "wall": 9.5, "version": 1, "stall_s": 0.1}


def test_pushes_and_scores_are_timed_by_the_journals_lines() -> None:
    assert recording.push_times(HEAD) == [(pytest.approx(0.1), pytest.approx(0.5))]
    assert recording.scoring_times(HEAD, [COMPLETIONS]) == pytest.approx([0.2])


def journals(folder: Path, **lines_of: list[dict[str, Any]]) -> Path:
    """A run's folder with these journals."""
    (folder / "journal").mkdir()
    for role, lines in lines_of.items():
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (folder / "journal" / f"{role}-0.0.jsonl").write_text(text)
    (folder / "config.json").write_text(Config().model_dump_json())
    return folder


def test_a_run_that_is_too_short_is_not_measured(tmp_path: Path) -> None:
    where = journals(tmp_path, head=HEAD, learner=[], generator=COMPLETIONS)
    with pytest.raises(ConfigError, match="after a warm-up of 4, and a measurement needs more than 5"):
        tool.main(["--from", str(where)])


@pytest.mark.parametrize(
    ("lines_of", "part"),
    [
        ({}, "journal of a learner"),
        ({"learner": []}, "push that a generator received"),
        ({"learner": [], "generator": COMPLETIONS}, "push that a generator received"),
        ({"learner": [], "generator": [RECEIVED, COMPLETIONS[1]]}, "sample with its verdict"),
    ],
)
def test_a_run_with_a_missing_journal_is_not_measured(
    tmp_path: Path, lines_of: dict[str, list[dict[str, Any]]], part: str
) -> None:
    names = "batch", "update", "push", "publish"
    steps = [
        {"event": name, "t": 4.0 * n + at, "step": n, "version": n + 1, "n_tokens": 9}
        for n in range(20)
        for at, name in enumerate(names)
    ]
    where = journals(tmp_path, head=steps, **lines_of)
    with pytest.raises(ConfigError, match=f"has no {part}"):
        tool.main(["--from", str(where)])


def test_observed_lengths_have_equal_probability() -> None:
    seen = ObservedLengths([3, 5, 5, 9])
    assert [seen.draw(i / 4) for i in range(4)] == [3, 5, 5, 9]
    assert seen.draw(0.9999) == 9
    assert seen.mean(6) == pytest.approx(19 / 4)


# the command

CONFIG = "configs/simulated.toml"


def test_the_table_has_each_split_and_eta(capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.main([CONFIG, "--gpus", "4", "--etas", "0,2", "--steps", "5", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [(row["learners"], row["generators"], row["eta"]) for row in told["rows"]] == [
        (1, 3, 0), (1, 3, 2), (2, 2, 0), (2, 2, 2), (3, 1, 0), (3, 1, 2)
    ]  # fmt: skip
    assert all(0 < row["tokens_per_s"] <= 1.1 * row["bound"] for row in told["rows"])
    assert tool.main([CONFIG, "--etas", "1", "--steps", "5"]) == 0
    text = capsys.readouterr().out
    assert "simulated, not measured" in text
    assert f"split      1 + 6: that of {CONFIG} (--split L+G, or --gpus N: all splits of N devices)" in text
    assert tool.main([CONFIG, "--gpus", "1", "--etas", "1", "--steps", "5"]) == 0
    assert "shared" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "give a CONFIG.toml"),
        ([CONFIG, "--gpus", "0"], "--gpus must be 1 or more"),
        ([CONFIG, "--split", "1-3"], "--split must be two whole numbers"),
        ([CONFIG, "--split", "1+3", "--gpus", "4"], "give either --gpus"),
        ([CONFIG, "--lengths", "60"], "--lengths must be a median"),
        ([CONFIG, "--cores", "2"], "--cores needs a run with --from"),
        (["--from", "runs", "--replicates", "-1"], "--replicates must be 0 or more"),
        ([CONFIG, "--steps", "0"], "--steps must be 1 or more"),
        ([CONFIG, "--push-s", "-1"], "0 or more"),
        ([CONFIG, "--train-tokens-per-s", "0"], "must be above 0"),
        ([CONFIG, "--step-s", "nan"], "finite numbers"),
        ([CONFIG, "--push-s", "inf"], "finite numbers"),
        ([CONFIG, "--train-tokens-per-s", "inf"], "finite numbers"),
        ([CONFIG, "--etas", "1,x"], "whole numbers from 0"),
        ([CONFIG, "--from", "nowhere"], "does not exist"),
        (["--from", "runs", "--push-s", "1"], "give either --from"),
        (["configs/demo.toml"], "give a split"),
        (
            ["configs/tiny.toml", "--gpus", "4", "--set", "rollout.on_update=finish_old"],
            "is not simulated: set .recompute., .keep. or .drain.",
        ),
        ([CONFIG, "--gpus", "2", "--set", "topology.tensor_parallel=4"], "a split needs a learner and a generator"),
        ([CONFIG, "--gpus", "1", "--set", "topology.tensor_parallel=2"], "a split needs a learner and a generator"),
    ],
)
def test_impossible_arguments_end_with_an_error_line(words: list[str], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        tool.main(words)
