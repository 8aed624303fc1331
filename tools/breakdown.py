"""Where each actor's time went: its wall time by label, with the check that every second has a label (I12)."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools import run, terminal
from tools.run import Line

TOLERANCE = 0.01  # of the wall time (I12)
SLACK_S = 0.005  # lives of a few milliseconds: writing the lines themselves takes part of one

MORE = """\
Each process labels every second of its life; labels do not overlap. For each actor the labels must sum to its wall
time within 1 %; where they do not, this says so and exits with code 1. A running or killed actor is measured up to the
last second that it labelled."""


@dataclass(slots=True)
class Life:
    """One life of one process: from its start line to its last spans line."""

    name: str  # generator-0.1
    began: float  # monotonic
    marked: float  # monotonic: up to here every second has a label
    wall_s: float | None = None  # what its end line says; None: no end line
    error: str | None = None
    spans: dict[str, float] = field(default_factory=dict)

    @property
    def measured_s(self) -> float:
        """Wall time that the labels must account for."""
        return self.marked - self.began if self.wall_s is None else self.wall_s

    @property
    def labelled_s(self) -> float:
        return sum(self.spans.values())

    @property
    def whole(self) -> bool:
        """Do the labels sum to the wall time (I12)?"""
        return abs(self.labelled_s - self.measured_s) <= max(TOLERANCE * self.measured_s, SLACK_S)

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        return "no end line (running or killed)" if self.wall_s is None else "ended"


def lives(path: Path) -> list[Life]:
    """The lives in one journal file; a resumed process that appends to the same file begins another."""
    found: list[Life] = []
    for line in run.lines(path, "start", "spans", "end", "failed"):
        if line["event"] == "start" or not found:
            name = f"{line['role']}-{line['rank']}.{line['inc']}"
            found.append(Life(name, began=line["t"], marked=line["t"]))
        take(found[-1], line)
    return found


def take(life: Life, line: Line) -> None:
    """Add one line to its life."""
    if line["event"] == "spans":
        life.marked = line["t"]
        for key, seconds in line.items():
            if key.startswith("s_"):
                life.spans[key[2:]] = life.spans.get(key[2:], 0.0) + seconds
    elif line["event"] == "end":
        life.wall_s = float(line["wall_s"])
    elif line["event"] == "failed" and "name" not in line:  # with a name the head tells of another actor
        life.error = str(line.get("error", ""))


def table(life: Life) -> list[str]:
    """One life as lines: a heading, then a row a label, most time first."""
    heading = f"{life.name}   {life.measured_s:.1f} s   {life.state}"
    if life.error:
        heading += f": {terminal.quote(life.error.splitlines()[0], indent='', width=200)}"
    if not life.spans:
        return [heading, "  no labelled second yet"]
    total = life.measured_s or life.labelled_s or 1.0
    ordered = sorted(life.spans.items(), key=lambda item: -item[1])
    rows = [(f"  {label}", f"{s:.2f} s", f"{s / total:.1%}", terminal.bar(s / total)) for label, s in ordered]
    return [heading, *terminal.columns(rows, right=frozenset({1, 2}))]


def broken(life: Life) -> str:
    """The sentence for a life whose labels do not sum to its wall time."""
    off = life.labelled_s - life.measured_s
    return (
        f"I12: labels must sum to the wall time within {TOLERANCE:.0%}: {life.name} has {life.labelled_s:.3f} s of "
        f"labels in {life.measured_s:.3f} s ({off:+.3f} s)"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m tools.breakdown",
        description="Show where each actor's time went.",
        epilog=MORE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    found = [life for path in where.journals() for life in lives(path)]
    bad = [life for life in found if not life.whole]
    if args.json:
        actors = [asdict(life) | {"labelled_s": life.labelled_s, "measured_s": life.measured_s} for life in found]
        print(json.dumps({"run": str(where.folder), "whole": not bad, "actors": actors}))
        return 1 if bad else 0
    print(f"{where.folder} ({where.name}): wall time of each actor, by what it was spent on\n")
    for life in found:
        print("\n".join(table(life)), end="\n\n")
    print("\n".join(broken(life) for life in bad) or "labels sum to the wall time within 1 % for every actor (I12)")
    return 1 if bad else 0


if __name__ == "__main__":
    terminal.end(main)
