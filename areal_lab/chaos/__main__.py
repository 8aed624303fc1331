"""`areal-bus chaos CONFIG`: a job of the config under random kills, stops and cut connections, and what they cost."""

import argparse
import math
import signal
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import NoReturn

from areal_bus.config import loader
from areal_bus.config.names.packaged import find_and_announce
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process.commands import SCRIPT, find_mpirun
from areal_bus.process.terminal import is_terminal
from areal_lab.chaos.chaos_job import ChaosJob
from areal_lab.chaos.chaos_outcome import outcome_of, text_of
from areal_lab.chaos.chaos_run import CALM_UPDATES, ChaosPlan, ChaosRun
from areal_lab.chaos.fault_schedule import DEFAULT, FaultKind
from areal_lab.sweep.starting import log_of
from launch.plan.topology import check_count, min_ranks
from tools import terminal

FOREVER = 1_000_000  # steps
RESTARTS = 100_000  # our kills must not end the job by launch.max_restarts
EPILOG = f"""\
It starts the job under mpirun and waits for {CALM_UPDATES} updates and a checkpoint. Then faults come at random times
to actors, each equally likely, and to engine servers: kills, and half as many stops (SIGSTOP for up to 6 s) and cuts of
all connections. --faults rank also kills ranks: the job ends, and is resumed. With --minutes the job goes on until then
(run.total_train_steps is raised unless --set gives it), is drained, and resumed to an orderly end; else it runs to its
own. launch.max_restarts is raised. docs/faults.md defines ETTR.

exit code: 0 nothing lost or trained twice, audit clean; 1 a finding or a failed job; 2 the config does not run here

examples:
  {SCRIPT} chaos configs/tiny.toml -np 4 --minutes 10
  {SCRIPT} chaos my.toml --kills-per-minute 6 --minutes 30 --faults kill --seed 7 --json"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        f"{SCRIPT} chaos",
        description="Run a job of this config under random faults; measure what they cost.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("config", metavar="CONFIG", help="a TOML file")
    p.add_argument("-np", dest="ranks", type=int, metavar="N", help="ranks (the least that the topology accepts)")
    p.add_argument("--kills-per-minute", type=positive, default=1.0, metavar="X", help="on average (1)")
    p.add_argument("--minutes", type=positive, metavar="M", help="of faults (until the job ends by itself)")
    p.add_argument(
        "--faults", type=kinds, default=DEFAULT, metavar="KIND,...", help=f"of {', '.join(FaultKind)} (kill,stop,cut)"
    )
    p.add_argument("--seed", type=int, default=1, metavar="N", help="of times, kinds and victims (1)")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="any other setting")
    p.add_argument("--output", type=Path, metavar="FOLDER", help="a new folder of the run (runs/chaos-NAME-TIME)")
    p.add_argument("--json", action="store_true", help="one JSON object on the last line")
    return p


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"invalid number {text!r}: it must be above 0")
    return value


def kinds(text: str) -> tuple[FaultKind, ...]:
    """Raises ArgumentTypeError for an unknown kind."""
    words = [word.strip() for word in text.split(",")]
    if unknown := [word for word in words if word not in set(FaultKind)]:
        raise argparse.ArgumentTypeError(f"unknown kind {unknown[0]!r}: it is one of {', '.join(FaultKind)}")
    return tuple(kind for kind in FaultKind if kind in words)


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    path = find_and_announce(args.config)
    config = loader.load(path, args.set)
    ranks = args.ranks if args.ranks is not None else min_ranks(config.topology)
    check_count(config.topology, ranks)
    find_mpirun()
    folder = args.output or Path("runs") / f"chaos-{config.run.name or path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    if folder.exists():
        raise ConfigError(f"--output must be a new folder: {folder} exists")
    job = ChaosJob(path, settings_of(config, args.set, args.minutes), ranks=ranks, run=folder.resolve())
    plan = ChaosPlan(args.faults, args.kills_per_minute, args.minutes, args.seed)
    signal.signal(signal.SIGTERM, stop)
    say, show = lines(time.monotonic())
    say(f"a job of {ranks} ranks in {folder}; its output: {log_of(folder)}")
    run = ChaosRun(job, plan, say, show)
    run.run()
    check_length(run)
    outcome = outcome_of(run)
    print("\n".join(text_of(outcome)))
    print(f"run: {folder}")
    if args.json:
        print(terminal.json_line(outcome.as_json() | {"seed": args.seed, "run": str(folder)}))
    return int(not outcome.is_clean)


def settings_of(config: Config, given: Sequence[str], minutes: float | None) -> list[str]:
    """What --set gives, over the settings that faults and --minutes need."""
    needed = [f"launch.max_restarts={RESTARTS}"]
    if minutes is not None:
        needed += [f"run.total_train_steps={FOREVER}", "evaluate.early_stop_patience=0"]
    if minutes is not None and config.data.total_train_epochs is not None:
        needed.append(f"data.total_train_epochs={FOREVER}")
    return [*needed, *given]


def check_length(run: ChaosRun) -> None:
    """Raises ConfigError for a job that never started, or that ended before the first fault could come."""
    if run.begins or (run.failure and run.watch.survivors.updates):
        return
    if run.failure:
        raise ConfigError(f"failed start: {run.failure} ({log_of(run.job.run)})")
    raise ConfigError(
        f"too short a run: it ended after {run.watch.version} updates, before any fault; give it --minutes, or more "
        "run.total_train_steps"
    )


def lines(began: float) -> "tuple[partial[None], partial[None]]":
    """Functions that print a line, and a state that the next line replaces on a terminal."""
    return partial(print_line, began), partial(print_state, began)


def print_line(began: float, text: str) -> None:
    start = "\r\x1b[K" if is_terminal(sys.stderr) else ""
    print(f"{start}[{time.monotonic() - began:6.1f} s] {text}", file=sys.stderr, flush=True)


def print_state(began: float, text: str) -> None:
    if is_terminal(sys.stderr):
        room = terminal.width() - 1
        print(f"\r\x1b[K{f'[{time.monotonic() - began:6.1f} s] {text}'[:room]}", end="", file=sys.stderr, flush=True)


def stop(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    terminal.end(main)
