"""Lists the runs of a folder as one table: steps, best held-out score, eta, speed and state."""

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean

from areal_bus.errors import ConfigError
from tools import terminal
from tools.report.facts.run_facts import RunFacts, read_curves
from tools.report.page.charts import number
from tools.report.verdict.learning import METRICS
from tools.run import Run
from tools.why import make_report

EPILOG = """\
examples:
  python -m tools.runs                      the runs below runs/, by name
  python -m tools.runs --sort held_out      the best held-out score first
  python -m tools.runs /data/runs --json    one JSON object a run

Numbers are sorted with the largest first, texts from A to Z; runs without the value come last."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One run of the list; `--json` prints these fields, `--sort` takes their names."""

    name: str
    steps: int  # the newest version
    held_out: float | None  # the best evaluation, of those before and after training, too
    metric: str  # of `held_out`: avg_at_k, accuracy or reward; "" without an evaluation
    eta: int | None
    tokens_per_s: float | None  # sampled tokens, mean over the steps
    state: str  # alive, stalled, interrupted, dead, ended, failed


KEYS = tuple(one.name for one in fields(ListedRun))


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser("python -m tools.runs", __doc__, EPILOG)
    p.add_argument("folder", nargs="?", type=Path, default=Path("runs"), help="folder with the runs (runs)")
    p.add_argument("--sort", choices=KEYS, default="name", metavar="KEY", help=f"one of {', '.join(KEYS)} (name)")
    p.add_argument("--json", action="store_true", help="one JSON object a run")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    found = ordered([listed(where) for where in runs_below(args.folder)], args.sort)
    if args.json:
        print("\n".join(json.dumps(asdict(one)) for one in found))
        return 0
    columns = ("name", "steps", "best held-out", "eta", "tokens/s", "state")
    print("\n".join(terminal.table([columns, *map(cells, found)], right=frozenset({1, 2, 3, 4}))))
    return 0


def runs_below(folder: Path) -> list[Run]:
    """The runs in a folder, without links such as runs/latest. Raises ConfigError without one."""
    inside = sorted(folder.iterdir()) if folder.is_dir() else []
    found = [Run(path) for path in inside if path.is_dir() and not path.is_symlink()]
    found = [one for one in found if one.journals()]
    if not found:
        raise ConfigError(f"missing runs: {folder} has no folder with a journal; give the folder that holds the runs")
    return found


def listed(where: Run) -> ListedRun:
    """The row of one run. Raises ConfigError when its journal has another schema."""
    facts, status = read_curves(where, where.name), make_report(where, time.time())
    metric = next((name for name in METRICS if len(facts.curve(name))), "")
    speeds = facts.curve("perf/tokens_per_s").values
    eta = facts.setting("rollout.max_head_offpolicyness")
    return ListedRun(
        name=where.name,
        steps=status.version or 0,
        held_out=best(facts, metric),
        metric=metric.partition("/")[2],
        eta=eta if isinstance(eta, int) else None,
        tokens_per_s=fmean(speeds) if speeds else None,
        state=status.state,
    )


def best(facts: RunFacts, metric: str) -> float | None:
    return max(facts.curve(metric).values, default=None) if metric else None


def ordered(found: Sequence[ListedRun], key: str) -> list[ListedRun]:
    """Numbers with the largest first, texts from A to Z, runs without a value last."""
    with_value = [one for one in found if getattr(one, key) is not None]
    is_text = all(isinstance(getattr(one, key), str) for one in with_value)
    chosen = sorted(with_value, key=lambda one: getattr(one, key), reverse=not is_text)
    return [*chosen, *(one for one in found if getattr(one, key) is None)]


def cells(one: ListedRun) -> tuple[str, ...]:
    """A row of the table; "-" for a value that the run does not have."""
    held_out = "-" if one.held_out is None else f"{number(one.held_out)} {one.metric.replace('_at_k', '@k')}"
    speed = "-" if one.tokens_per_s is None else number(one.tokens_per_s)
    eta = "-" if one.eta is None else str(one.eta)
    return one.name, str(one.steps), held_out, eta, speed, one.state


if __name__ == "__main__":
    terminal.end(main)
