"""`python -m areal_lab.adapt`: the planner of [topology.adapt] on drawn workloads, next to fixed splits."""

import argparse
import json
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.process.commands import as_here
from areal_lab.adapt.compare import EVERY_STEPS, Comparison, compare
from areal_lab.adapt.scenario import draw
from tools import terminal

GOAL = 0.95  # of the clairvoyant schedule
EPILOG = """\
Each workload is drawn from its seed: ranks, lengths, speeds, batch, eta, noise and the time of a change. Answers double
in length and later fall to half of what they were at first. best fixed: the fastest split that never changes.
clairvoyant: the best schedule of splits by one that knows all lengths and speeds ahead and pays the same time for a
change. planner: the production planner (areal_bus/core/planner/split_planner.py), from the split that is best at
first; it sees what the head sees. Throughput is in trained tokens a second of virtual time."""
TITLES = ("seed", "ranks", "eta", "best fixed", "clairvoyant", "planner", "of clairvoyant", "over fixed", "splits")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        as_here("python -m areal_lab.adapt"),
        description="Compare the planner of [topology.adapt] with fixed splits and a clairvoyant schedule.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    p.add_argument("--workloads", type=int, default=10, metavar="N", help="how many are drawn (default: 10)")
    p.add_argument("--first", type=int, default=0, metavar="SEED", help="seed of the first (default: 0)")
    p.add_argument(
        "--every-steps", type=int, default=EVERY_STEPS, metavar="N",
        help=f"topology.adapt.every_steps (default: {EVERY_STEPS})",
    )  # fmt: skip
    p.add_argument("--json", action="store_true", help="one JSON object on one line")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    for name in ("workloads", "every_steps"):
        if getattr(args, name) < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more: it is {getattr(args, name)}")
    seeds = range(args.first, args.first + args.workloads)
    found = [compare(draw(seed), every_steps=args.every_steps) for seed in terminal.progress(seeds, "simulating")]
    if args.json:
        print(json.dumps({"workloads": [as_json(each) for each in found], "summary": summary(found)}))
    else:
        print("\n".join([*table(found), "", *summary_lines(summary(found))]))
    return 0


def table(found: Sequence[Comparison]) -> list[str]:
    cells = [TITLES]
    for each in found:
        load = each.workload
        cells.append((
            str(load.seed), str(load.n_ranks), str(load.schedule.eta),
            f"{each.fixed[each.best_fixed]:,.0f} ({each.best_fixed} + {load.n_ranks - each.best_fixed})",
            f"{each.clairvoyant:,.0f}", f"{each.planner.throughput:,.0f}", f"{each.of_clairvoyant:.1%}",
            f"{each.over_best_fixed:+.1%}", ", ".join(f"{n} at {step}" for step, n in each.planner.changes.items()),
        ))  # fmt: skip
    return terminal.table(cells, right=frozenset(range(8)))


def summary(found: Sequence[Comparison]) -> dict[str, Any]:
    """Figures over all workloads."""
    shares, gains = [each.of_clairvoyant for each in found], [each.over_best_fixed for each in found]
    return {
        "n": len(found),
        "of_clairvoyant_mean": fmean(shares),
        "of_clairvoyant_least": min(shares),
        "n_at_goal": sum(share >= GOAL for share in shares),
        "over_best_fixed_mean": fmean(gains),
        "over_best_fixed_median": median(gains),
        "over_best_fixed_least": min(gains),
        "n_above_best_fixed": sum(gain > 0 for gain in gains),
        "clairvoyant_over_best_fixed_mean": fmean(each.clairvoyant / each.fixed[each.best_fixed] - 1 for each in found),
        "n_changes_mean": fmean(len(each.planner.changes) - 1 for each in found),
        "mean_lag": fmean(each.planner.mean_lag for each in found),
    }


def summary_lines(of: dict[str, Any]) -> list[str]:
    return [
        f"of the clairvoyant schedule: {of['of_clairvoyant_mean']:.1%} on average, {of['of_clairvoyant_least']:.1%} at "
        f"least; {GOAL:.0%} or more in {of['n_at_goal']} of {of['n']}",
        f"over the best fixed split: {of['over_best_fixed_mean']:+.1%} on average (clairvoyant: "
        f"{of['clairvoyant_over_best_fixed_mean']:+.1%}), {of['over_best_fixed_least']:+.1%} at least; above it in "
        f"{of['n_above_best_fixed']} of {of['n']}",
        f"changes of the split: {of['n_changes_mean']:.1f} on average; mean lag {of['mean_lag']:.2f}",
    ]


def as_json(each: Comparison) -> dict[str, Any]:
    return {
        "seed": each.workload.seed,
        "ranks": each.workload.n_ranks,
        "eta": each.workload.schedule.eta,
        "fixed": each.fixed,
        "clairvoyant": each.clairvoyant,
        "plan": each.plan,
        "adaptive": each.planner.throughput,
        "changes": each.planner.changes,
        "mean_lag": each.planner.mean_lag,
        "of_clairvoyant": each.of_clairvoyant,
        "over_best_fixed": each.over_best_fixed,
    }


if __name__ == "__main__":
    terminal.end(main)
