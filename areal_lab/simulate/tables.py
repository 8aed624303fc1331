"""What the planner prints: its assumptions, the table of a sweep, and JSON."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from areal_bus.config.capacity import slots
from areal_bus.config.sections import Config
from areal_lab.simulate.calibration import Measured
from areal_lab.simulate.intervals import Prediction, Range, predict
from areal_lab.simulate.schedule import LengthModel, Schedule
from areal_lab.simulate.sweep import RingSpeed, Split, measured_speed, schedules
from tools import terminal
from tools.run import Run


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


NEAR_BEST = 0.98  # of the best of its split, in tokens that train
UNLIMITED_TOKENS_PER_S = 1e9  # tokens/s of a learner whose time does not depend on them
TITLES = ("learn + generate", "eta", "tokens/s", "90 %", "of bound", "learner waits", "generators wait", "slots",
          "lag mean/max", "masked", "dropped", "")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One cell of the sweep."""

    split: Split
    eta: int
    schedule: Schedule
    predicted: Prediction

    @property
    def of_bound(self) -> float:
        return self.predicted.outcome.tokens_per_s / self.schedule.bound


def heading(config: Config, pace: RingSpeed, where: Run | None) -> list[str]:
    """The assumptions, as lines."""
    speeds, n_slots, most = pace.speeds, slots(config), config.gconfig.max_new_tokens
    mean = pace.lengths.mean(most)
    source = f" (speeds and lengths of {where.folder})" if where is not None else ""
    has_prefills = math.isfinite(speeds.prefill_tokens_per_s)
    prefills = f"{speeds.prefill_tokens_per_s:,.0f} prefilled" if has_prefills else "prefills included"
    trains = (
        f"{pace.train_tokens_per_s:,.0f} tokens/s a rank"
        if pace.train_tokens_per_s < UNLIMITED_TOKENS_PER_S
        else "any tokens at once"
    )
    return [
        f"simulated, not measured{source}: {config.data.batch_size} x {config.gconfig.n_samples} samples a batch, "
        f"{config.rollout.staleness_policy}, {config.rollout.on_update}",
        f"answers    {mean:,.0f} tokens on average, {most:,} at most; prompts of {pace.prompt_tokens:,}",
        f"generator  {speeds.tokens_per_s(n_slots):,.0f} tokens/s with all {n_slots} slots live, "
        f"{speeds.tokens_per_s(1):,.0f} with one, {prefills}; an update stops it for {speeds.update_s:.2f} s",
        f"learner    {trains} and {pace.step_s:.2f} s a step; a push takes {pace.push_s:.2f} s, a reward "
        f"{pace.reward_s:.2f} s",
        *core_line(pace, where),
    ]


def core_line(pace: RingSpeed, where: Run | None) -> list[str]:
    """The line on shared cores, of a measured run."""
    if where is None:
        return []
    cores = pace.cores
    if cores is None:
        return ["cores      enough for all actors (the journal has no CPU times of one host, or --cores 0)"]
    slower = f"; beside busy cores a generator is {cores.generator_slowdown:.0%} slower"
    return [
        f"cores      {cores.n:g}: a busy generator uses {cores.generator:.2f}, a learner rank {cores.learner:.2f}, "
        f"head and rewards {1e3 * cores.sample_s:.2f} ms a sample{slower}"
    ]


def overlap_warning(pace: RingSpeed, rows: Sequence[SweepCell]) -> list[str]:
    """A line where a plan needs what busy cores cost each other and its run does not show it."""
    if pace.cores is None or not pace.shows_no_overlap or not any(overlaps(row) for row in rows):
        return []
    return [
        f"warning    generators of this run never compute beside busy cores: a slowdown of "
        f"{pace.cores.generator_slowdown:.0%} is assumed; measure a run at eta 1 or more"
    ]


def overlaps(row: SweepCell) -> bool:
    """Whether several actors compute at once in this cell. One generator and the learner take turns at eta 0."""
    return row.eta > 0 or row.split.generators > 1


def table(rows: Sequence[SweepCell]) -> list[str]:
    cells: list[tuple[str, ...]] = [TITLES]
    for row in rows:
        o = row.predicted.outcome
        cells.append((
            str(row.split), str(row.eta), f"{o.tokens_per_s:,.0f}",
            plus_minus(o.tokens_per_s, row.predicted.tokens_per_s),
            f"{row.of_bound:.0%}", f"{o.learner_waits:.0%}",
            f"{o.generators_wait:.0%}", f"{o.slots_used:.0%}", f"{o.lag_mean:.2f}/{o.lag_max}", f"{o.masked:.1%}",
            f"{o.dropped:.1%}", "*" if row is smallest_good_eta(rows, row.split) else "",
        ))  # fmt: skip
    if not any(row.predicted.tokens_per_s for row in rows):  # nothing measured
        cells = [(*cell[:3], *cell[4:]) for cell in cells]
    return terminal.table(cells, right=frozenset(range(1, len(cells[0]) - 1)))


def smallest_good_eta(rows: Sequence[SweepCell], split: Split) -> SweepCell:
    """The smallest eta of this split with at least NEAR_BEST of its best throughput, without masked tokens."""
    of_split = sorted((row for row in rows if row.split == split), key=lambda row: row.eta)
    best = max(row.predicted.outcome.trained_per_s for row in of_split)
    return next(row for row in of_split if row.predicted.outcome.trained_per_s >= NEAR_BEST * best)


def comparison_lines(itself: RunComparison | None) -> list[str]:
    if itself is None:
        return []
    outcome = itself.predicted.outcome
    return [
        "",
        f"the run itself (eta {itself.eta}): {itself.measured:,.0f} tokens/s over {itself.n_updates} updates, mean lag "
        f"{itself.measured_lag:.2f}; simulated {outcome.tokens_per_s:,.0f}: {itself.error:+.1%}, lag "
        f"{outcome.lag_mean:.2f}",
    ]


def as_json(pace: RingSpeed, rows: Sequence[SweepCell], itself: RunComparison | None) -> dict[str, object]:
    return {
        "speeds": {key: finite_or_none(value) for key, value in asdict(pace.speeds).items()},
        "train_tokens_per_s": pace.train_tokens_per_s,
        "step_s": pace.step_s,
        "push_s": pace.push_s,
        "reward_s": pace.reward_s,
        "prompt_tokens": pace.prompt_tokens,
        "cores": asdict(pace.cores) if pace.cores is not None else None,
        "warnings": overlap_warning(pace, rows),
        "run": asdict(itself) | {"error": itself.error} if itself is not None else None,
        "rows": [
            asdict(row.split)
            | {"eta": row.eta, "bound": row.schedule.bound}
            | asdict(row.predicted.outcome)
            | {"interval": asdict(row.predicted.tokens_per_s) if row.predicted.tokens_per_s is not None else None}
            for row in rows
        ],
    }


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity: an unlimited speed becomes null."""
    return value if value < float("inf") else None
