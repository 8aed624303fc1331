"""`python -m tools.simulate CONFIG.toml`: predicts throughput, waits and lag of a ring for each split and eta."""

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from areal_bus.config import loader as settings
from areal_bus.config.capacity import slots
from areal_bus.config.packaged import find_and_announce
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from tools import run, terminal
from tools.simulate.calibration import Measured, config_of, measure
from tools.simulate.outcome import Outcome, simulate_steady_state
from tools.simulate.schedule import Schedule
from tools.simulate.sweep import (
    LEARNER_SPEED_FACTOR,
    RingSpeed,
    Split,
    assumed_speed,
    measured_speed,
    schedules,
    splits,
)


@dataclass(frozen=True, slots=True)
class RunComparison:
    """A run and its simulation."""

    eta: int
    measured: float  # tokens/s
    n_updates: int
    simulated: Outcome

    @property
    def error(self) -> float:
        """Relative error of the simulated throughput."""
        return self.simulated.tokens_per_s / self.measured - 1


def compare_with_run(
    config: Config, speeds: Measured, seen: Measured, *, eta: int, n_steps: int, seed: int = 0
) -> RunComparison:
    """Simulate the run `seen` at this eta with the speeds and lengths of `speeds`, and compare."""
    ((_, _, schedule),) = schedules(config, measured_speed(speeds), [split_of(seen)], [eta])
    return RunComparison(
        eta, seen.tokens_per_s, seen.n_updates, simulate_steady_state(schedule, n_steps=n_steps, seed=seed)
    )


def split_of(seen: Measured) -> Split:
    """The split of a run. The speeds of a run on one shared device already include the sharing."""
    return Split(seen.n_learners, seen.n_generators)


ETAS = "0,1,2,4,8"
NEAR_BEST = 0.98  # of the best of its split, in tokens that train
UNLIMITED_TOKENS_PER_S = 1e9  # tokens/s of a learner whose time does not depend on them
EPILOG = """\
The figures come from a model in virtual time with the production gate. Lengths and the generators' speed are those of
[engine.simulated] (change them with --set), the learner's speed that of the options; with --from all are measured in a
run. tokens/s: sampled tokens that updates consume in a second. bound: the slower half alone. slots: share of slots with
a live sample. *: the smallest eta within 2 % of the best of its split, without masked tokens. The model assumes that
training speed is proportional to the learner ranks, that long contexts do not slow decoding, and that nothing fails. On
one shared device both halves run at half speed while both work."""
TITLES = ("learn + generate", "eta", "tokens/s", "of bound", "learner waits", "generators wait", "slots",
          "lag mean/max", "masked", "dropped", "")  # fmt: skip


@dataclass(frozen=True, slots=True)
class SweepCell:
    """One cell of the sweep."""

    split: Split
    eta: int
    schedule: Schedule
    outcome: Outcome

    @property
    def of_bound(self) -> float:
        return self.outcome.tokens_per_s / self.schedule.bound


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m tools.simulate"),
        description="Simulate a ring in virtual time: throughput, waits and lag by split and eta.",
        epilog=as_here(EPILOG),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("config", nargs="?", metavar="CONFIG.toml", help="the settings (with --from: the run's own)")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="as for a launch")
    p.add_argument("--from", dest="run", metavar="RUN", help="measure speeds and lengths in this run's journal")
    p.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="simulate all splits of N devices (default: the split of the config; with --from: of the run)",
    )
    p.add_argument("--etas", default=ETAS, metavar="0,1,...", help=f"which etas (default: {ETAS})")
    p.add_argument("--train-tokens-per-s", type=float, metavar="X", help="sampled tokens that one learner rank trains; "
                   f"default: {LEARNER_SPEED_FACTOR:g} times what a full generator samples on a device")  # fmt: skip
    p.add_argument("--step-s", type=float, default=0.0, metavar="S", help="fixed time of a training step (default: 0)")
    p.add_argument(
        "--push-s", type=float, default=0.0, metavar="S", help="from an update to the arrival of its weights"
    )
    p.add_argument("--reward-s", type=float, default=0.0, metavar="S", help="from a sample's end to its score")
    p.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help="tokens of a prompt (default: 0)")
    p.add_argument("--steps", type=int, default=40, help="updates that are measured (default: 40)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_arguments(args)
    where = run.find(args.run) if args.run else None
    config = sweep_config(args, where)
    seen = measure(where, config_of(where)) if where is not None else None
    pace = measured_speed(seen) if seen is not None else pace_of_options(config, args)
    each = [split_of(seen)] if seen is not None and not args.gpus else splits(config, args.gpus)
    cells = list(schedules(config, pace, each, etas(args.etas)))
    rows = [
        SweepCell(*cell, simulate_steady_state(cell[-1], n_steps=args.steps, seed=args.seed))
        for cell in terminal.progress(cells, "simulating")
    ]
    itself = compare_itself(where, seen, args) if where is not None and seen is not None else None
    if args.json:
        print(json.dumps(as_json(pace, rows, itself)))
    else:
        print(
            "\n".join(
                [*heading(config, pace, where), split_line(each, args), "", *table(rows), *comparison_lines(itself)]
            )
        )
    return 0


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for missing or impossible values."""
    said = [args.train_tokens_per_s, args.step_s, args.push_s, args.reward_s, args.prompt_tokens]
    rules = [
        (not args.config and not args.run, "give a CONFIG.toml, or a run with --from"),
        (args.gpus is not None and args.gpus < 1, f"--gpus must be 1 or more: it is {args.gpus}"),
        (args.steps < 1, f"--steps must be 1 or more: it is {args.steps}"),
        (not all(math.isfinite(x) for x in said if x is not None), "times and speeds must be finite numbers"),
        (min(args.step_s, args.push_s, args.reward_s, args.prompt_tokens) < 0, "times and tokens must be 0 or more"),
        (args.train_tokens_per_s is not None and args.train_tokens_per_s <= 0, "--train-tokens-per-s must be above 0"),
        (bool(args.run) and any(said), "give either --from, which measures speeds, or options with speeds"),
    ]  # fmt: skip
    for broken, sentence in rules:
        if broken:
            raise ConfigError(sentence)


def etas(text: str) -> list[int]:
    """The list of etas. Raises ConfigError unless they are whole numbers from 0."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"--etas must be whole numbers from 0, separated by commas: it is {text!r}")
    return [int(word) for word in words]


def sweep_config(args: argparse.Namespace, where: run.Run | None) -> Config:
    """The settings of the sweep."""
    if args.config:
        return settings.load(find_and_announce(args.config), args.set)
    assert where is not None
    if args.set:
        raise ConfigError("--set changes a CONFIG.toml: give one in addition to --from")
    return config_of(where)


def pace_of_options(config: Config, args: argparse.Namespace) -> RingSpeed:
    return assumed_speed(
        config,
        train=args.train_tokens_per_s,
        step_s=args.step_s,
        push_s=args.push_s,
        reward_s=args.reward_s,
        prompt_tokens=args.prompt_tokens,
    )


def compare_itself(where: run.Run, seen: Measured, args: argparse.Namespace) -> RunComparison:
    """Simulate the run with its own eta, and compare."""
    config = config_of(where)
    return compare_with_run(
        config, seen, seen, eta=config.rollout.max_head_offpolicyness, n_steps=args.steps, seed=args.seed
    )


def heading(config: Config, pace: RingSpeed, where: run.Run | None) -> list[str]:
    """The assumptions, as lines."""
    speeds, n_slots, most = pace.speeds, slots(config), config.gconfig.max_new_tokens
    mean = pace.lengths.mean(most)
    source = f" (speeds and lengths of {where.folder})" if where is not None else ""
    prefills = "prefills included" if where is not None else f"{speeds.prefill_tokens_per_s:,.0f} prefilled"
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
    ]


def split_line(each: Sequence[Split], args: argparse.Namespace) -> str:
    """The line that states the simulated splits."""
    if args.gpus:
        return f"split      all splits of {args.gpus} devices"
    whose = f"that of {args.run}" if args.run else f"that of {args.config}"
    unused = f", not that of {args.config}" if args.run and args.config else ""
    return f"split      {', '.join(map(str, each))}: {whose}{unused} (--gpus N: all splits of N devices)"


def table(rows: Sequence[SweepCell]) -> list[str]:
    cells = [TITLES]
    for row in rows:
        o = row.outcome
        cells.append((
            str(row.split), str(row.eta), f"{o.tokens_per_s:,.0f}", f"{row.of_bound:.0%}", f"{o.learner_waits:.0%}",
            f"{o.generators_wait:.0%}", f"{o.slots_used:.0%}", f"{o.lag_mean:.2f}/{o.lag_max}", f"{o.masked:.1%}",
            f"{o.dropped:.1%}", "*" if row is smallest_good_eta(rows, row.split) else "",
        ))  # fmt: skip
    return terminal.table(cells, right=frozenset(range(1, 10)))


def smallest_good_eta(rows: Sequence[SweepCell], split: Split) -> SweepCell:
    """The smallest eta of this split with at least NEAR_BEST of its best throughput, without masked tokens."""
    of_split = sorted((row for row in rows if row.split == split), key=lambda row: row.eta)
    best = max(row.outcome.trained_per_s for row in of_split)
    return next(row for row in of_split if row.outcome.trained_per_s >= NEAR_BEST * best)


def comparison_lines(itself: RunComparison | None) -> list[str]:
    if itself is None:
        return []
    return [
        "",
        f"the run itself (eta {itself.eta}): {itself.measured:,.0f} tokens/s over {itself.n_updates} updates; "
        f"simulated {itself.simulated.tokens_per_s:,.0f}: {itself.error:+.1%}",
    ]


def as_json(pace: RingSpeed, rows: Sequence[SweepCell], itself: RunComparison | None) -> dict[str, object]:
    return {
        "speeds": {key: finite_or_none(value) for key, value in asdict(pace.speeds).items()},
        "train_tokens_per_s": pace.train_tokens_per_s,
        "step_s": pace.step_s,
        "push_s": pace.push_s,
        "reward_s": pace.reward_s,
        "prompt_tokens": pace.prompt_tokens,
        "run": asdict(itself) | {"error": itself.error} if itself is not None else None,
        "rows": [
            asdict(row.split) | {"eta": row.eta, "bound": row.schedule.bound} | asdict(row.outcome) for row in rows
        ],
    }


def finite_or_none(value: float) -> float | None:
    """JSON has no infinity: an unlimited speed becomes null."""
    return value if value < float("inf") else None


if __name__ == "__main__":
    terminal.end(main)
