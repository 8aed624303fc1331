"""Compares a run with its prediction from the speeds of another run, or of itself."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

from areal_bus.config.sections import Config
from areal_lab.simulate.calibration import Measured
from areal_lab.simulate.intervals import Prediction, Range, predict
from areal_lab.simulate.schedule import LengthModel, Schedule
from areal_lab.simulate.sweep import Split, measured_speed, schedules


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run and its prediction."""

    split: Split
    eta: int
    measured: float  # tokens/s
    measured_lag: float
    n_updates: int
    predicted: Prediction

    @property
    def error(self) -> float:
        """Relative error of the predicted throughput."""
        return self.predicted.outcome.tokens_per_s / self.measured - 1

    @property
    def lag_error(self) -> float:
        """In versions."""
        return self.predicted.outcome.lag_mean - self.measured_lag


def compare_with_run(
    config: Config,
    speeds: Measured,
    seen: Measured,
    *,
    n_steps: int,
    lengths: LengthModel | None = None,
    repeated: Iterable[Measured] = (),
    seed: int = 0,
) -> RunComparison:
    """Predict the run `seen`, which had these settings, from the speeds of `speeds` and its lengths or `lengths`."""
    split, eta = split_of(seen), config.rollout.max_head_offpolicyness

    def schedule_of(measured: Measured) -> Schedule:
        pace = measured_speed(measured)
        ((_, _, schedule),) = schedules(config, replace(pace, lengths=lengths or pace.lengths), [split], [eta])
        return schedule

    predicted = predict(schedule_of, speeds, repeated, n_steps=n_steps, n_repeated=seen.n_updates, seed=seed)
    return RunComparison(split, eta, seen.tokens_per_s, seen.lag_mean, seen.n_updates, predicted)


def split_of(seen: Measured) -> Split:
    """The split of a run. The speeds of a run on one shared device already include the sharing."""
    return Split(seen.n_learners, seen.n_generators)


def plus_minus(value: float, interval: Range | None) -> str:
    """An interval as shares of the value: its half-width, or both ends where they lie differently; "" without one."""
    if interval is None or not value:
        return ""
    down, up = 1 - interval.low / value, interval.high / value - 1
    return f"± {up:.0%}" if math.isclose(down, up, rel_tol=1e-6) else f"-{down:.0%} +{up:.0%}"
