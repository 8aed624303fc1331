"""Shows where the time of a run went: by role, by step, by cause; checks that every second has a label (I12)."""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict

from tools import run, terminal
from tools.breakdown import flops, incarnations, steps, waits
from tools.breakdown.incarnations import TOLERANCE, Incarnation, read_all
from tools.terminal import run_parser

EPILOG = f"""\
Each process labels every second of its wall time; labels do not overlap. For each actor the labels must sum to its wall
time within 1 %; otherwise the exit code is 1. A running or killed actor is measured up to the last second that it
labelled.

Model FLOP utilisation:
{flops.FORMULA}"""


def label_rows(actor: Incarnation) -> list[str]:
    """The lines of one incarnation: a heading, then a row for each label, most time first."""
    heading = f"{actor.name}   {actor.measured_s:.1f} s   {actor.state}"
    if actor.error:
        heading += f": {terminal.quote(actor.error.splitlines()[0], indent='', width=200)}"
    if not actor.spans:
        return [heading, "  no labelled second yet"]
    ordered = sorted(actor.spans, key=lambda label: -actor.spans[label])
    rows = [
        (f"  {label}", f"{actor.spans[label]:.2f} s", f"{actor.share(label):.1%}", terminal.bar(actor.share(label)))
        for label in ordered
    ]
    return [heading, *terminal.columns(rows, right=frozenset({1, 2}))]


def violation(actor: Incarnation) -> str:
    """The error line for an incarnation whose labels do not sum to its wall time."""
    off = actor.labelled_s - actor.measured_s
    has = f"{actor.name} has {actor.labelled_s:.3f} s of labels in {actor.measured_s:.3f} s ({off:+.3f} s)"
    return f"I12: labels must sum to the wall time within {TOLERANCE:.0%}: {has}"


def tflops(text: str) -> float:
    """A positive number of 10^12 FLOP/s, in FLOP/s."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"the peak of a process is above 0: got {text}")
    return value * 1e12


def parser() -> argparse.ArgumentParser:
    p = run_parser("tools.breakdown", __doc__, EPILOG)
    p.add_argument("--all", action="store_true", help="the labels of each process, too")
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    peak = "peak of one process in 10^12 FLOP/s, for the utilisation (known for some GPUs in bfloat16)"
    p.add_argument("--peak-tflops", type=tflops, metavar="X", help=peak)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    where = run.find(args.run)
    found, taken = read_all(where), steps.read_steps(where)
    bad = [actor for actor in found if not actor.whole]
    waited, cost = waits.waits(found, taken), waits.push_cost(where, found, taken)
    used = flops.utilisation(where, found, taken, peak=args.peak_tflops)
    if args.json:
        actors = [asdict(actor) | {"labelled_s": actor.labelled_s, "measured_s": actor.measured_s} for actor in found]
        told = {
            "run": str(where.folder),
            "whole": not bad,
            "actors": actors,
            "roles": [asdict(one) for one in incarnations.label_shares(found)],
            "stragglers": [asdict(one) for one in incarnations.stragglers(found)],
            "n_steps": len(taken),
            "steps": steps.summary(taken),
            "waits": waits.as_json(waited),
            "pushes": asdict(cost),
            "flops": [asdict(one) | {"rate": one.rate, "mfu": one.mfu} for one in used],
        }
        print(json.dumps(told))
        return 1 if bad else 0
    print(f"{where.folder} ({where.name}): wall time of {len(found)} processes by label\n")
    if args.all:
        print("\n\n".join("\n".join(label_rows(actor)) for actor in found), end="\n\n")
    sections = {
        "By role": incarnations.role_lines(found),
        "By step": steps.step_lines(taken),
        "Stragglers": incarnations.straggler_lines(found),
        "Waits by cause": waits.wait_lines(waited),
        "Pushes": waits.push_lines(cost),
        "Model FLOP utilisation": flops.flop_lines(used),
    }
    for title, lines in sections.items():
        print("\n".join([title, *(f"  {line}" for line in lines)]), end="\n\n")
    print("\n".join(map(violation, bad)) or "labels sum to the wall time within 1 % for every actor (I12)")
    return 1 if bad else 0


if __name__ == "__main__":
    terminal.end(main)
