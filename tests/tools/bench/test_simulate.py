"""Bench `simulate`: its figures for runs of known throughput."""

from dataclasses import replace

import pytest
from tools.bench.jobs.simulator_accuracy import CONFIG, figures

from areal_bus.config import loader as settings
from areal_bus.core.workload import SpeedLaw
from tools.bench import __main__ as bench
from tools.simulate.__main__ import compare_with_run
from tools.simulate.calibration import Measured
from tools.simulate.schedule import ObservedLengths

SEEN = Measured(
    lengths=ObservedLengths([20, 40, 60, 120]),
    speeds=SpeedLaw(decode_tokens_per_s=400.0, half_slots=8.0, prefill_tokens_per_s=float("inf"), update_s=0.1),
    train_tokens_per_s=1000.0,
    step_s=0.1,
    push_s=0.1,
    reward_s=0.01,
    n_generators=2,
    n_learners=1,
    n_updates=10,
    tokens_per_s=300.0,
)


def test_errors_are_of_the_speeds_at_eta_0_and_the_largest_is_named() -> None:
    config = settings.load(CONFIG)
    true = {eta: compare_with_run(config, SEEN, SEEN, eta=eta, n_steps=100).simulated.tokens_per_s for eta in (0, 2)}
    other = replace(SEEN.speeds, decode_tokens_per_s=1.0)  # of no account: speeds are those at eta 0
    seen = {
        0: replace(SEEN, tokens_per_s=true[0]),
        2: replace(SEEN, tokens_per_s=true[2] / 1.25, speeds=other),
    }
    found = figures(config, seen)
    assert found["error_eta0"] == pytest.approx(0.0)
    assert found["error_eta2"] == found["errors"] == pytest.approx(0.25)
    assert true[2] > true[0]


def test_the_bench_is_in_the_list() -> None:
    assert "simulated engine" in bench.catalogue()
