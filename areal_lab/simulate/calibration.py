"""Fits speeds to the observations of a run, as input of a schedule.

A generator's decode speed is fitted to its samples: the time of each by the number of live samples. Where the engine
does not measure prefills, the speed includes them, and predictions for a very different split or number of slots are
extrapolations.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, pstdev

from areal_bus.config.removed import saved
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_lab.ring.workload import SpeedLaw
from areal_lab.simulate.cores import Cores
from areal_lab.simulate.generator_history import HALF_SLOTS, Exposure, prefill_token_s
from areal_lab.simulate.recording import Recording, record
from areal_lab.simulate.schedule import ObservedLengths
from tools.run import Run

USUAL_SLOWDOWN = 0.15  # of a generator beside busy cores, where a run does not show it: caches and memory are shared
LEARNER_SLOWDOWN = 0.04  # of a learner beside busy cores: an update takes 1.03 to 1.06 times as long (performance.md)
ABOUT_AS_WELL = 1.05  # squared error
USUAL_HALF = 1 / 3  # of the slots: half_slots where a run does not show it
VARIES = 0.15  # least standard deviation of the number of live samples, over its mean
SLOWDOWNS = 0.05, 0.25  # least and most of a generator
COMPUTES = 0.5  # least cores of a busy generator that others slow down
OVERLAPS = 0.1  # least share of the work beside busy cores that shows what it costs
SHOWS = 0.02  # of the variance of the crowded time that its samples must show beside their time


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run."""

    lengths: ObservedLengths
    speeds: SpeedLaw  # of a generator
    train_tokens_per_s: float  # of all learner ranks together
    step_s: float
    push_s: float
    reward_s: float
    prompt_tokens: int
    cores: Cores | None  # None: the journal has no CPU times, or the actors are on several hosts
    n_generators: int
    n_learners: int
    n_updates: int  # measured
    tokens_per_s: float  # consumed by the measured updates
    lag_mean: float
    crowded: float = 1.0  # share of the generators' work beside busy cores

    @property
    def shows_no_overlap(self) -> bool:
        """Whether generators compute on cores, and never while other cores were busy."""
        return self.cores is not None and self.cores.generator >= COMPUTES and self.crowded < OVERLAPS


def measure(where: Run, config: Config) -> Measured:
    """Raises ConfigError for a run that is too short, or in which the head or a learner was restarted."""
    return fit(record(where, config))


def fit(seen: Recording, *, usual_slowdown: float = USUAL_SLOWDOWN) -> Measured:
    """The speeds that explain the observations; a slowdown that the run does not show is `usual_slowdown`."""
    limit, half_slots, slowdown = fit_decoding(seen.exposures, seen.n_slots, usual_slowdown)
    crowded = crowded_share(seen.exposures)
    prefill_s = prefill_token_s(seen.prefills, seen.prompt_tokens) * (1 - slowdown * crowded)
    stall_s = fmean(seen.stalls_s)
    step_s, token_s = fit_steps(seen)
    begins_s, takes_s = zip(*seen.pushes_s, strict=True)
    return Measured(
        lengths=ObservedLengths(sorted(seen.lengths)),
        speeds=SpeedLaw(
            decode_tokens_per_s=limit,
            half_slots=half_slots,
            prefill_tokens_per_s=1 / prefill_s if prefill_s > 0 else math.inf,
            update_s=stall_s,
        ),
        train_tokens_per_s=1 / max(token_s, 1e-12),
        step_s=step_s,
        push_s=max(0.0, median(begins_s) + fmean(takes_s) - stall_s),
        reward_s=max(0.0, median(seen.scoring_s)),
        prompt_tokens=round(seen.prompt_tokens),
        cores=cores_of(seen, slowdown),
        n_generators=seen.n_generators,
        n_learners=seen.n_learners,
        n_updates=seen.n_updates,
        tokens_per_s=seen.tokens_per_s,
        lag_mean=seen.lag_mean,
        crowded=crowded,
    )


def cores_of(seen: Recording, slowdown: float) -> Cores | None:
    cpu = seen.cpu
    if cpu is None:
        return None
    return Cores(cpu.n_cores, cpu.generator, cpu.learner, seen.n_learners, cpu.sample_s, slowdown, LEARNER_SLOWDOWN)


def fit_steps(seen: Recording) -> tuple[float, float]:
    """(fixed seconds of a training step, seconds a token), prompts counted.

    By the labels of the learner where it has them, else by a line through the steps.
    """
    points = [
        (
            step.n_tokens + step.n_groups * seen.prompt_tokens,
            step.seconds * (1 - LEARNER_SLOWDOWN * step.crowded),
            1.0,
        )
        for step in seen.steps
    ]
    if seen.by_tokens is None:
        return fit_line(points)
    total_s, n_tokens = sum(seconds for _, seconds, _ in points), sum(n for n, _, _ in points)
    return (1 - seen.by_tokens) * total_s / len(points), seen.by_tokens * total_s / n_tokens


def crowded_share(seen: Sequence[Exposure]) -> float:
    """Share of the decode time in which the other cores were busy, if the generator computes on its own."""
    at = len(HALF_SLOTS) // 2
    alone = sum(one.alone[at] for one in seen)
    return sum(one.crowded[at] for one in seen) / alone if alone else 0.0


def fit_decoding(
    seen: Sequence[Exposure], n_slots: int, usual_slowdown: float = USUAL_SLOWDOWN
) -> tuple[float, float, float]:
    """(limit of tokens/s, half_slots, slowdown beside busy cores): least squares of the tokens of each sample.

    Of values of half_slots that fit about as well, the one nearest to USUAL_HALF of the slots. That one itself where
    the number of live samples hardly varies, as in a run whose slots are always full.
    """
    usual = USUAL_HALF * n_slots
    by_distance = sorted(range(len(HALF_SLOTS)), key=lambda at: abs(math.log((HALF_SLOTS[at] + 0.1) / usual)))
    fits = {at: fit_at(at, seen, usual_slowdown) for at in (by_distance if varies(seen) else by_distance[:1])}
    least = min(error for error, _, _ in fits.values())
    best = next(at for at in by_distance if at in fits and fits[at][0] <= ABOUT_AS_WELL * least)
    _, limit, slowdown = fits[best]
    return limit, HALF_SLOTS[best], slowdown


def varies(seen: Sequence[Exposure]) -> bool:
    """Whether the mean number of live samples differs among the samples enough to fit half_slots."""
    at = len(HALF_SLOTS) // 2
    shares = [one.alone[at] / one.alone[0] for one in seen if one.alone[0] > 0]  # live / (live + h)
    n_live = [HALF_SLOTS[at] * share / (1 - share) for share in shares]
    return len(n_live) > 1 and pstdev(n_live) >= VARIES * fmean(n_live)


def fit_at(at: int, seen: Sequence[Exposure], slowdown: float) -> tuple[float, float, float]:
    """(weighted squared error, limit, slowdown) for the h at this place: tokens = limit (alone - slowdown crowded).

    The given slowdown stays where the samples do not show one.
    """
    rows = [(one.alone[at], one.crowded[at], 1 / one.n_tokens) for one in seen]
    t1, c1 = sum(t for t, _, _ in rows), sum(c for _, c, _ in rows)
    tt, tc, cc = (
        sum(t * t * w for t, _, w in rows),
        sum(t * c * w for t, c, w in rows),
        sum(c * c * w for _, c, w in rows),
    )
    if tt * cc - tc * tc > SHOWS * tt * cc:
        slowdown = (tc * t1 - tt * c1) / (cc * t1 - tc * c1) if cc * t1 > tc * c1 else 0.0
        slowdown = min(SLOWDOWNS[1], max(SLOWDOWNS[0], slowdown))
    base = [(t - slowdown * c, w) for t, c, w in rows]
    limit = sum(1 / w for _, w in base) / sum(x for x, _ in base)
    error = sum((1 / w - limit * x) ** 2 * w for x, w in base)
    return error, limit, slowdown


def fit_line(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """(intercept, slope) of the weighted least-squares line through (x, y, weight), neither below 0.

    Through the origin when the slope is below twice its standard error.
    """
    total = sum(w for _, _, w in points)
    x, y = sum(a * w for a, _, w in points) / total, sum(b * w for _, b, w in points) / total
    xx = sum((a - x) ** 2 * w for a, _, w in points)
    xy = sum((a - x) * (b - y) * w for a, b, w in points)
    off = sum((b - y) ** 2 * w for _, b, w in points) - (xy * xy / xx if xx else 0.0)
    shows = xy > 0 and xy * xy * (len(points) - 2) > 4 * xx * max(0.0, off)
    slope = min(xy / xx, y / x) if shows else y / x
    return y - slope * x, slope


def config_of(where: Run) -> Config:
    """The resolved settings of a run."""
    path = Path(where.folder) / "config.json"
    try:
        return saved(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config.json of a run must hold its settings: {path}: {error}") from None
