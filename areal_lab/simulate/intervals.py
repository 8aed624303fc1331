"""Intervals of a prediction: the calibration repeated on resampled observations (bootstrap), each with new lengths.

They contain what steps, lengths and decoding of the calibration run show of chance, the range of a slowdown that the
run does not show, the chance of the predicted updates themselves, and the usual error of the model's throughput.
"""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist, stdev
from typing import TypeVar

from areal_lab.simulate.calibration import SLOWDOWNS, Measured, fit
from areal_lab.simulate.outcome import Outcome, simulate_steady_state
from areal_lab.simulate.recording import Recording
from areal_lab.simulate.schedule import Schedule

REPLICATES = 12
BLOCKS = 8
COVERS = 0.9  # of the interval
MODEL_ERROR = 0.07  # of tokens/s: root mean square over pairs of runs, docs/choosing.md
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Range:
    """An interval."""

    low: float
    high: float

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


def resampled(seen: Recording, dice: random.Random) -> Recording:
    """The observations drawn anew, with replacement. CPU times and counts stay.

    What has an order in time is drawn in blocks, so that slow changes of a machine count.
    """

    def drawn(items: Sequence[Item]) -> list[Item]:
        return dice.choices(items, k=len(items)) if items else []

    def in_blocks(items: Sequence[Item]) -> list[Item]:
        n = min(BLOCKS, len(items))
        edges = [len(items) * i // n for i in range(n + 1)] if n else [0]
        blocks = [items[a:b] for a, b in pairwise(edges)]
        return [item for block in drawn(blocks) for item in block]

    return replace(
        seen,
        lengths=sorted(drawn(seen.lengths)),
        exposures=in_blocks(seen.exposures),
        prefills=in_blocks(seen.prefills),
        stalls_s=in_blocks(seen.stalls_s),
        steps=in_blocks(seen.steps),
        pushes_s=in_blocks(seen.pushes_s),
        scoring_s=in_blocks(seen.scoring_s),
    )


def replicas(seen: Recording, n: int, *, seed: int = 0) -> Iterator[Measured]:
    """`n` calibrations on resampled observations, each with another slowdown where the run shows none."""
    for index in range(n):
        dice = random.Random(seed * 1000 + index)
        yield fit(resampled(seen, dice), usual_slowdown=dice.uniform(*SLOWDOWNS))


def around(value: float, repeated: Sequence[float], *, model_error: float = 0.0) -> Range | None:
    """The interval around a prediction, from the scatter of its repetitions and the relative error of the model.

    None without two repetitions.
    """
    if len(repeated) < 2:
        return None
    reach = NormalDist().inv_cdf(0.5 + COVERS / 2) * math.hypot(stdev(repeated), model_error * value)
    return Range(value - reach, value + reach)


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted outcome of one schedule, and the intervals of its throughput and mean lag."""

    outcome: Outcome
    tokens_per_s: Range | None = None
    lag_mean: Range | None = None


def widened(found: Prediction, oversubscribed: float) -> Prediction:
    """The prediction with a lower end that lies as far down as busy actors may slow each other.

    `oversubscribed`: the cores that all actors want at once, over those that there are. At an eta above that of the run
    they work at once for longer than the run shows, so its speeds are those of less contention.
    """
    speed = found.tokens_per_s
    if speed is None or oversubscribed <= 1:
        return found
    return replace(found, tokens_per_s=Range(speed.low / oversubscribed, speed.high))


def predict(
    schedule_of: Callable[[Measured], Schedule],
    measured: Measured,
    repeated: Iterable[Measured],
    *,
    n_steps: int,
    n_repeated: int | None = None,
    seed: int = 0,
) -> Prediction:
    """Simulate the schedule with the measured speeds, and with each repetition of them over `n_repeated` updates."""
    outcome = simulate_steady_state(schedule_of(measured), n_steps=n_steps, seed=seed)
    others = [
        simulate_steady_state(schedule_of(one), n_steps=n_repeated or n_steps, seed=seed + index)
        for index, one in enumerate(repeated, start=1)
    ]
    return Prediction(
        outcome,
        around(outcome.tokens_per_s, [one.tokens_per_s for one in others], model_error=MODEL_ERROR),
        around(outcome.lag_mean, [one.lag_mean for one in others]),
    )
