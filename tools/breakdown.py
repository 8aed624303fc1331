"""Shows each actor's wall time by label, and checks that every second has a label (I12)."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tools import run, terminal
from tools.run import Line

TOLERANCE = 0.01  # of the wall time (I12)
TOLERANCE_S = 0.005  # for incarnations of a few milliseconds: writing the lines takes part of them

EPILOG = """\
Each process labels every second of its wall time; labels do not overlap. For each actor the labels must sum to its wall
time within 1 %; otherwise the exit code is 1. A running or killed actor is measured up to the last second that it
labelled."""


@dataclass(slots=True)
class Incarnation:
    """One incarnation of one actor, from its start line to its last spans line."""

    name: str  # generator-0.1
    began: float  # monotonic
    marked: float  # monotonic: every second until then has a label
    wall_s: float | None = None  # of its end line; None: no end line
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
        """Whether the labels sum to the wall time (I12)."""
        return abs(self.labelled_s - self.measured_s) <= max(TOLERANCE * self.measured_s, TOLERANCE_S)

    @property
    def state(self) -> str:
        if self.error is not None:
            return "failed"
        return "no end line (running or killed)" if self.wall_s is None else "ended"


def read_incarnations(path: Path) -> list[Incarnation]:
    """The incarnations in one journal file; every start line begins another one."""
    found: list[Incarnation] = []
    for line in run.lines(path, "start", "spans", "end", "failed"):
        if line["event"] == "start" or not found:
            name = f"{line['role']}-{line['rank']}.{line['inc']}"
            found.append(Incarnation(name, began=line["t"], marked=line["t"]))
        add_line(found[-1], line)
    return found


def add_line(actor: Incarnation, line: Line) -> None:
    """Add one journal line to its incarnation."""
    if line["event"] == "spans":
        actor.marked = line["t"]
        for key, seconds in line.items():
            if key.startswith("s_"):
                actor.spans[key[2:]] = actor.spans.get(key[2:], 0.0) + seconds
    elif line["event"] == "end":
        actor.wall_s = float(line["wall_s"])
    elif line["event"] == "failed" and "name" not in line:  # with a name, the head reports another actor
        actor.error = str(line.get("error", ""))


def label_rows(actor: Incarnation) -> list[str]:
    """The lines of one incarnation: a heading, then a row for each label, most time first."""
    heading = f"{actor.name}   {actor.measured_s:.1f} s   {actor.state}"
    if actor.error:
        heading += f": {terminal.quote(actor.error.splitlines()[0], indent='', width=200)}"
    if not actor.spans:
        return [heading, "  no labelled second yet"]
    total = actor.measured_s or actor.labelled_s or 1.0
    ordered = sorted(actor.spans.items(), key=lambda item: -item[1])
    rows = [(f"  {label}", f"{s:.2f} s", f"{s / total:.1%}", terminal.bar(s / total)) for label, s in ordered]
    return [heading, *terminal.columns(rows, right=frozenset({1, 2}))]


def violation(actor: Incarnation) -> str:
    """The error line for an incarnation whose labels do not sum to its wall time."""
    off = actor.labelled_s - actor.measured_s
    return (
        f"I12: labels must sum to the wall time within {TOLERANCE:.0%}: {actor.name} has {actor.labelled_s:.3f} s of "
        f"labels in {actor.measured_s:.3f} s ({off:+.3f} s)"
    )


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        "python -m tools.breakdown",
        description="Show where each actor's time went.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("run", nargs="?", metavar="RUN", help="folder of the run, or its name below runs/ (runs/latest)")
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    found = [actor for path in where.journals() for actor in read_incarnations(path)]
    bad = [actor for actor in found if not actor.whole]
    if args.json:
        actors = [asdict(actor) | {"labelled_s": actor.labelled_s, "measured_s": actor.measured_s} for actor in found]
        print(json.dumps({"run": str(where.folder), "whole": not bad, "actors": actors}))
        return 1 if bad else 0
    print(f"{where.folder} ({where.name}): wall time of each actor by label\n")
    for actor in found:
        print("\n".join(label_rows(actor)), end="\n\n")
    print(
        "\n".join(violation(actor) for actor in bad) or "labels sum to the wall time within 1 % for every actor (I12)"
    )
    return 1 if bad else 0


if __name__ == "__main__":
    terminal.end(main)
