"""`areal-bus doctor [CONFIG.toml ...]`: what is installed, what this machine offers, what would fail and the remedy."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from areal_bus.config.names.trackers import check_trackers
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.process import terminal
from areal_bus.process.commands import SCRIPT
from launch.checks.machine_checks import Finding, findings
from launch.commands.dry_run import make_plan_page
from launch.commands.main import load_settings
from launch.plan.topology import check_gpus, count_gpus

EPILOG = """\
With configs it also checks whether this machine has what they need: GPUs, memory, the packages of engine and trackers.
It starts mpirun with two idle processes and writes one small file next to the runs, which it removes. Exit code: 0 no
failure (warnings are not), 1 a failure, 2 invalid input."""
MARKS = {"ok": "ok", "warning": "WARNING", "failure": "FAILURE"}


def main(words: Sequence[str]) -> int:
    """Exit code. Raises ConfigError."""
    args = parser().parse_args(words)
    config, file = load_settings(args.config, None, args.set) if args.config else (Config(), None)
    found = list(findings(Path(config.run.folder)))
    if file is not None:
        found += check_config(config, file)
    is_good = all(one.state != "failure" for one in found)
    print(json.dumps({"ok": is_good, "findings": [asdict(one) for one in found]}) if args.json else as_text(found))
    return 0 if is_good else 1


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        f"{SCRIPT} doctor", description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("config", nargs="*", metavar="CONFIG.toml", help="the settings of a run")
    p.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="override a setting")
    p.add_argument("--json", action="store_true", help="one JSON object: ok, findings (name, state, seen, remedy)")
    return p


def check_config(config: Config, file: Path) -> Iterator[Finding]:
    """The plan of --dry-run, the GPUs and the trackers of a config."""
    try:
        page = make_plan_page(config, file, None)
        bad = [line for line in page.text.splitlines() if "DOES NOT FIT" in line]
        yield Finding("plan", "failure", bad[0], "lower what the line names") if bad else Finding("plan", "ok", "fits")
    except ConfigError as error:
        yield Finding("plan", "failure", str(error), "see --dry-run")
    try:
        if wanted := config.topology.gpus_per_host:
            check_gpus(wanted, ["this host"], [count_gpus()])
        check_trackers(config.journal.tracker)
    except ConfigError as error:
        yield Finding("config", "failure", str(error), "the remedy is in the sentence")


def as_text(found: Sequence[Finding]) -> str:
    rows = [("", "what", "seen"), *((MARKS[one.state], one.name, one.seen) for one in found)]
    remedies = [f"{MARKS[one.state]} {one.name}: {one.remedy}" for one in found if one.remedy]
    n_failures = sum(one.state == "failure" for one in found)
    n_warnings = len(remedies) - n_failures
    last = f"failures: {n_failures}, warnings: {n_warnings}"
    return "\n".join([*terminal.table(rows), "", *remedies, last])
