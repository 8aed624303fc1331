"""Writes RUN/report.html: a run, several runs or a sweep explained on one page that loads nothing from elsewhere."""

import argparse
import importlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from tools import run, terminal
from tools.report.facts.length_bias import length_biases
from tools.report.facts.run_facts import of_server, read_facts
from tools.report.facts.source_figures import source_figures
from tools.report.facts.token_account import fate_rows
from tools.report.page.comparison_page import comparison_page
from tools.report.page.parts import Page, write
from tools.report.page.run_page import run_page
from tools.report.verdict import judge
from tools.run import Run

SWEEP_PAGE = "areal_lab.sweep.page.sweep_page"  # by name: tools do not depend on laboratories

EPILOG = """\
examples:
  python -m tools.report                          the latest run: runs/latest/report.html
  python -m tools.report runs/demo runs/demo-2    two runs, overlaid: runs/demo/comparison.html
  python -m tools.report runs/sweeps/lag          the results of a sweep: runs/sweeps/lag/report.html

Runs whose settings differ in the seed only are one line with a band. The page of a running job shows the journal up to
now. docs/report.md explains the page."""


def parser() -> argparse.ArgumentParser:
    p = terminal.tool_parser("python -m tools.report", __doc__, EPILOG)
    p.add_argument(
        "runs", nargs="*", metavar="RUN", help="folder of a run, its name below runs/ (runs/latest), or of a sweep"
    )
    p.add_argument(
        "--output", type=Path, metavar="FILE", help="instead of report.html or comparison.html in the first RUN"
    )
    p.add_argument("--x", metavar="AXIS", help="of a sweep: the axis of the charts (the one with the most numbers)")
    p.add_argument("--json", action="store_true", help="of each run: one JSON object on one line, and no page")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    folders = [Path(name) for name in args.runs]
    if any((folder / "results.jsonl").is_file() for folder in folders):
        if args.json:
            raise ConfigError("--json describes runs: a sweep has its results in results.jsonl")
        if len(folders) > 1:
            raise ConfigError("a sweep has a report of its own: name its folder alone")
        return write(
            importlib.import_module(SWEEP_PAGE).read_page(folders[0], args.x), args.output or folders[0] / "report.html"
        )
    if args.x is not None:
        raise ConfigError("--x chooses the axis of a sweep: RUN must be a sweep's folder, with results.jsonl")
    found = [run.find(name) for name in args.runs] or [run.find(None)]
    if args.json:
        print("\n".join(terminal.json_line(as_json(where)) for where in found))
        return 0
    return write(
        page_of(found), args.output or found[0].folder / ("comparison.html" if len(found) > 1 else "report.html")
    )


def page_of(found: Sequence[Run]) -> Page:
    """The page of one run, or the comparison of several. Raises ConfigError when one is named twice."""
    facts = [read_facts(where, name) for where, name in zip(found, names_of(found), strict=True)]
    verdicts = [judge(one) for one in facts]
    if len(facts) > 1:
        return comparison_page(facts, verdicts)
    page: Page = (run_page if facts[0].clients is None else of_server().server_page)(facts[0], verdicts[0])
    return page


def as_json(where: Run) -> dict[str, Any]:
    """The verdict, where every token went, the length bias of what is trained, and the figures of each source."""
    facts = read_facts(where)
    biases = [asdict(one) for one in length_biases(facts.samples)]
    rows = [row._asdict() for row in fate_rows(facts.samples)]
    sources = [asdict(one) for one in source_figures(facts)]
    found = {"verdict": asdict(judge(facts)), "tokens": rows, "length_bias": biases, "sources": sources}
    return {"run": str(where.folder), **found}


def names_of(found: Sequence[Run]) -> list[str]:
    """Each run by the name of its folder; where two have the same, with the folder above it or the whole path."""
    whole = [where.folder.resolve() for where in found]
    twice = [folder for folder, n in Counter(whole).items() if n > 1]
    if twice:
        raise ConfigError(f"duplicate run: {twice[0]} is named twice, and a comparison needs different runs")
    for names in ([folder.name for folder in whole], [f"{folder.parent.name}/{folder.name}" for folder in whole]):
        if len(set(names)) == len(names):
            return names
    return [str(folder) for folder in whole]


if __name__ == "__main__":
    terminal.end(main)
