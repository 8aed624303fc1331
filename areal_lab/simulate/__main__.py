"""`python -m areal_lab.simulate CONFIG.toml`: predicts throughput, waits and lag of a ring for each split and eta."""

import argparse
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from areal_bus.config import loader as settings
from areal_bus.config.names.packaged import find_and_announce
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from areal_lab.ring.workload import LengthLaw
from areal_lab.simulate.calibration import Measured, config_of, fit
from areal_lab.simulate.intervals import REPLICATES, Prediction, predict, replicas, widened
from areal_lab.simulate.outcome import simulate_steady_state
from areal_lab.simulate.recording import record
from areal_lab.simulate.schedule import Schedule
from areal_lab.simulate.sweep import (
    LEARNER_SPEED_FACTOR,
    RingSpeed,
    Split,
    assumed_speed,
    measured_speed,
    schedules,
    splits,
)
from areal_lab.simulate.tables import (
    RunComparison,
    SweepCell,
    as_json,
    compare_with_run,
    comparison_lines,
    heading,
    overlap_warning,
    split_of,
    table,
)
from tools import run, terminal

ETAS = "0,1,2,4,8"
EPILOG = """\
The figures come from a model in virtual time with the production gate. Lengths and the generators' speed are those of
[engine.simulated] (change them with --set), the learner's speed that of the options; with --from all are measured in a
run. tokens/s: sampled tokens that updates consume in a second; 90 %: its interval, from the variation within the run
and of so many updates, and the usual error of the model. bound: the slower half alone. slots: share of slots with a
live sample. *: the smallest eta within 2 % of the best of its split, without masked tokens. The model assumes that
training speed is proportional to the learner ranks, that long contexts do not slow decoding, and that nothing fails.
Actors of a measured run share the cores of its host (--cores). Above the eta of the run they work at once for longer
than it shows, so where they want more cores than there are, the lower end of the interval is divided by the ratio.
On one shared device both halves run at half speed while both work."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m areal_lab.simulate"),
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
    p.add_argument("--split", metavar="L+G", help="simulate L learner ranks and G generators")
    p.add_argument("--etas", default=ETAS, metavar="0,1,...", help=f"which etas (default: {ETAS})")
    p.add_argument("--lengths", metavar="MEDIAN,SIGMA", help="log-normal lengths of answers instead of the run's")
    p.add_argument("--cores", type=int, metavar="N", help="cores that all actors share (with --from; default: those of "
                   "the run's host; 0: enough)")  # fmt: skip
    p.add_argument("--train-tokens-per-s", type=float, metavar="X", help="sampled tokens that one learner rank trains; "
                   f"default: {LEARNER_SPEED_FACTOR:g} times what a full generator samples on a device")  # fmt: skip
    p.add_argument("--step-s", type=float, default=0.0, metavar="S", help="fixed time of a training step (default: 0)")
    p.add_argument(
        "--push-s", type=float, default=0.0, metavar="S", help="from an update to the arrival of its weights"
    )
    p.add_argument("--reward-s", type=float, default=0.0, metavar="S", help="from a sample's end to its score")
    p.add_argument("--prompt-tokens", type=int, default=0, metavar="N", help="tokens of a prompt (default: 0)")
    p.add_argument("--steps", type=int, default=40, help="updates that are measured (default: 40)")
    p.add_argument("--replicates", type=int, default=REPLICATES, metavar="N",
                   help=f"calibrations of an interval, with --from (default: {REPLICATES}; 0: none)")  # fmt: skip
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    check_arguments(args)
    where = run.find(args.run) if args.run else None
    config = sweep_config(args, where)
    if where is None:
        pace, itself = pace_of_options(config, args), None
        cells = list(schedules(config, pace, each_split(config, args, None), etas(args.etas)))
        rows = [
            SweepCell(*cell, Prediction(simulate_steady_state(cell[-1], n_steps=args.steps, seed=args.seed)))
            for cell in terminal.progress(cells, "simulating")
        ]
    else:
        pace, rows, itself = predicted_from(where, config, args)
    if args.json:
        print(json.dumps(as_json(pace, rows, itself)))
    else:
        each = each_split(config, args, rows[0].split)
        lines = [*heading(config, pace, where), split_line(each, args), *overlap_warning(pace, rows), "", *table(rows)]
        print("\n".join([*lines, *comparison_lines(itself)]))
    return 0


def predicted_from(
    where: run.Run, config: Config, args: argparse.Namespace
) -> tuple[RingSpeed, list[SweepCell], RunComparison]:
    """The sweep from the speeds of a run, with intervals, and the run beside its own prediction."""
    of_run = config_of(where)
    seen = record(where, of_run)
    measured, repeated = fit(seen), list(replicas(seen, args.replicates, seed=args.seed))
    pace = pace_of_run(measured, args)
    cells = list(schedules(config, pace, each_split(config, args, split_of(measured)), etas(args.etas)))
    rows = []
    for split, eta, schedule in terminal.progress(cells, "simulating"):
        found = predict(schedule_for(config, split, eta, args), measured, repeated, n_steps=args.steps, seed=args.seed)
        if pace.cores is not None and eta > of_run.rollout.max_head_offpolicyness:
            shared = replace(pace.cores, learners=split.learners)
            found = widened(found, shared.oversubscribed(generators=split.generators))
        rows.append(SweepCell(split, eta, schedule, found))
    return pace, rows, compare_with_run(of_run, measured, measured, n_steps=args.steps, seed=args.seed)


def schedule_for(config: Config, split: Split, eta: int, args: argparse.Namespace) -> Callable[[Measured], Schedule]:
    """What makes the schedule of one cell from measured speeds."""

    def schedule_of(measured: Measured) -> Schedule:
        ((_, _, schedule),) = schedules(config, pace_of_run(measured, args), [split], [eta])
        return schedule

    return schedule_of


def check_arguments(args: argparse.Namespace) -> None:
    """Raises ConfigError for missing or impossible values."""
    said = [args.train_tokens_per_s, args.step_s, args.push_s, args.reward_s, args.prompt_tokens]
    rules = [
        (not args.config and not args.run, "give a CONFIG.toml, or a run with --from"),
        (args.gpus is not None and args.gpus < 1, f"--gpus must be 1 or more: it is {args.gpus}"),
        (bool(args.gpus) and bool(args.split), "give either --gpus, which simulates all splits, or --split"),
        (args.steps < 1, f"--steps must be 1 or more: it is {args.steps}"),
        (args.replicates < 0, f"--replicates must be 0 or more: it is {args.replicates}"),
        (args.cores is not None and not args.run, "--cores needs a run with --from, which shows what actors compute"),
        (args.cores is not None and args.cores < 0, f"--cores must be 0 or more: it is {args.cores}"),
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


def lengths_of(text: str) -> LengthLaw:
    """The law of --lengths. Raises ConfigError unless it is a median of 1 or more and a sigma of 0 to 4."""
    try:
        median, sigma = (float(word) for word in text.split(","))
    except ValueError:
        median, sigma = math.nan, math.nan
    if not (1 <= median < math.inf and 0 <= sigma <= 4):
        raise ConfigError(
            f"--lengths must be a median of 1 or more and a sigma of 0 to 4, as in 60,0.5: it is {text!r}"
        )
    return LengthLaw(median, sigma)


def each_split(config: Config, args: argparse.Namespace, of_run: Split | None) -> list[Split]:
    """The splits to simulate. Raises ConfigError if none is given, or --split is none."""
    if args.split:
        found = re.fullmatch(r"\s*([1-9]\d*)\s*\+\s*([1-9]\d*)\s*", args.split)
        if found is None:
            raise ConfigError(f"--split must be two whole numbers from 1, as in 1+3: it is {args.split!r}")
        return [Split(int(found[1]), int(found[2]))]
    return [of_run] if of_run is not None and not args.gpus else splits(config, args.gpus)


def sweep_config(args: argparse.Namespace, where: run.Run | None) -> Config:
    """The settings of the sweep."""
    if args.config:
        return settings.load(find_and_announce(args.config), args.set)
    assert where is not None
    if args.set:
        raise ConfigError("--set changes a CONFIG.toml: give one in addition to --from")
    return config_of(where)


def pace_of_options(config: Config, args: argparse.Namespace) -> RingSpeed:
    pace = assumed_speed(
        config,
        train=args.train_tokens_per_s,
        step_s=args.step_s,
        push_s=args.push_s,
        reward_s=args.reward_s,
        prompt_tokens=args.prompt_tokens,
    )
    return replace(pace, lengths=lengths_of(args.lengths)) if args.lengths else pace


def pace_of_run(measured: Measured, args: argparse.Namespace) -> RingSpeed:
    """The speeds of a run, with the lengths and cores of the options. Raises ConfigError without CPU times."""
    pace = measured_speed(measured)
    if args.lengths:
        pace = replace(pace, lengths=lengths_of(args.lengths))
    if args.cores is None:
        return pace
    if args.cores and pace.cores is None:
        raise ConfigError("--cores needs a run whose journal has CPU times (cpu_s), with all actors on one host")
    return replace(pace, cores=replace(pace.cores, n=args.cores) if args.cores and pace.cores is not None else None)


def split_line(each: Sequence[Split], args: argparse.Namespace) -> str:
    """The line that states the simulated splits."""
    if args.gpus:
        return f"split      all splits of {args.gpus} devices"
    if args.split:
        return f"split      {each[0]}"
    whose = f"that of {args.run}" if args.run else f"that of {args.config}"
    unused = f", not that of {args.config}" if args.run and args.config else ""
    return (
        f"split      {', '.join(map(str, each))}: {whose}{unused} (--split L+G, or --gpus N: all splits of N devices)"
    )


if __name__ == "__main__":
    terminal.end(main)
