"""Finds what goes wrong in a run: each alarm with its rule, samples to read, and what to try."""

import argparse
import os
import shlex
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from tools import run, terminal
from tools.alarms.alarm_reader import AlarmReader, Finding, LiveAlarms, read
from tools.follow import is_over, stopped_by
from tools.run import Line, Run
from tools.terminal import run_parser

INTERVAL_S = 2.0
EPILOG = """\
docs/alarms.md lists the rules; watch.off of the run's config turns one off. Alarms of undone versions are left out.
Exit code 0: no alarm was raised; 1: one was, even if it no longer holds; 2: the folder is no run."""


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.alarms", __doc__, EPILOG)
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    p.add_argument("--follow", action="store_true", help="print a line for each new alarm until the run ends")
    p.add_argument("--until-eof", action="store_true", help="follow until standard input ends, at low priority")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    if args.json and (args.follow or args.until_eof):
        raise ConfigError("--json prints one object: leave out --follow and --until-eof")
    if args.until_eof:
        where = run.starting(args.run)
        os.nice(10)
        follow(LiveAlarms(where), stopped_by(end_of_input=True), lambda now: False)
        return 0  # the job's rank reports other codes
    where = Run(run.find(args.run).folder.resolve())  # runs/latest may point to another run later
    if args.follow:
        return follow(LiveAlarms(where), stopped_by(end_of_input=False), lambda now: is_over(where, now))
    reader = read(where)
    print(as_json(where, reader) if args.json else "\n".join(render(where, reader, terminal.width())))
    return 1 if reader.findings() else 0


def as_json(where: Run, reader: AlarmReader) -> str:
    alarms = [asdict(finding) for finding in reader.findings()]
    found = {"run": str(where.folder), "version": reader.version, "alarms": alarms, "not_checked": reader.unseen()}
    return terminal.json_line(found)


def follow(live: LiveAlarms, stopped: threading.Event, ends: Callable[[float], bool]) -> int:
    """Print each alarm when it is raised, until the run is over or `stopped` is set."""
    while True:
        was_stopped, now = stopped.is_set(), time.time()
        over = was_stopped or ends(now)  # before the read, which then covers the last lines
        for finding in live.advance(float("inf") if over else None):
            show(live.where.folder, finding)
        if over:
            return 1 if live.reader.findings() else 0
        stopped.wait(INTERVAL_S)


def show(folder: Path, finding: Finding) -> None:
    print(headline(folder, finding), flush=True)


def headline(folder: Path, finding: Finding) -> str:
    """One line for the console of a job."""
    seen = terminal.printable(finding.seen)
    return as_here(
        f"alarm {finding.name} at version {finding.since}: {seen}; python -m tools.alarms {shlex.quote(str(folder))}"
    )


def render(where: Run, reader: AlarmReader, width: int) -> Iterator[str]:
    found = reader.findings()
    n = f"{len(found)} alarm{'' if len(found) == 1 else 's'}" if found else "no alarm"
    yield f"{where.folder} ({where.name}): {n} in {reader.version} versions"
    for finding in found:
        yield ""
        yield from _alarm(where.folder, finding, width)
    unseen = reader.unseen()
    if unseen:
        yield ""
        yield "not checked, because the journal lacks:"
        yield from terminal.columns([(f"  {name}", needs) for name, needs in unseen.items()])


def _alarm(folder: Path, finding: Finding, width: int) -> Iterator[str]:
    holds = "and holds" if finding.is_active else f"held last at version {finding.last}"
    yield f"{finding.name}: raised at version {finding.since}, {holds}"
    for title, text in (("rule", finding.rule), ("seen", finding.seen), ("try", finding.advice)):
        lines = textwrap.wrap(terminal.printable(text), max(width - 8, 20))
        yield from (f"  {title if i == 0 else '':<5} {line}" for i, line in enumerate(lines))
    if finding.samples:
        yield as_here(f"  read  python -m tools.samples {shlex.quote(str(folder))} --step N --uid U")
        yield from (f"    {_sample(sample, width - 4)}" for sample in finding.samples)


def _sample(sample: Line, width: int) -> str:
    reward = sample.get("reward")
    worth = f"{reward:.3f}" if isinstance(reward, int | float) else "none"
    head = f"step {sample['step']} uid {sample['uid']}, reward {worth}: "
    half = max((width - len(head) - 4) // 2, 12)
    prompt = terminal.one_line(sample["prompt"], width=half, keep_end=True)
    return f"{head}{prompt} -> {terminal.one_line(sample['completion'], width=half)}"


if __name__ == "__main__":
    terminal.end(main)
