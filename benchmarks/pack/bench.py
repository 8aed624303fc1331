"""Bench `pack`: number, evenness and time of micro-batches and rank shares, beside AReaL's."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from areal_bus.errors import ConfigError
from benchmarks.harness import worker_process
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import Side
from benchmarks.pack.inputs import LONGEST, MEDIAN, SIGMA, lengths

N = 8192
CAPACITY = 16384
RANKS = 64
AREAL = "areal"


class PackBench:
    about = "8,192 sequences into micro-batches and over 64 ranks, beside AReaL's first-fit and Karmarkar-Karp"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without the peers."""
        with ExitStack() as stack:
            sides = {
                AREAL: stack.enter_context(worker_process.peer("pack.areal")),
                OURS: stack.enter_context(worker_process.ours("pack.ours")),
            }
            control = stack.enter_context(worker_process.ours("harness.sgemm"))
            packed = PackTask("micro_batches", {"capacity": CAPACITY}, sides, control)
            shared = PackTask("shares", {"n_ranks": RANKS}, sides, control)
            return {"bench": "pack"} | packed_figures(packed) | shared_figures(shared) | packed.rounds.figures()


class PackTask:
    """One of the two, over rounds; each round has lengths of its own, the same for both sides."""

    def __init__(self, do: str, arguments: dict[str, Any], sides: dict[str, Side], control: Side) -> None:
        self.totals: dict[str, list[list[int]]] = {name: [] for name in sides}  # tokens of each part, of each round
        self._asked = 0

        def measure(name: str) -> float:
            given = lengths(N, seed=self._asked // len(sides))
            self._asked += 1
            answer = sides[name].ask(do, lengths=given, **arguments)
            self.totals[name].append(totals(answer["parts"], given))
            return float(answer["seconds"])

        self.rounds: Rounds = interleave(
            {name: partial(measure, name) for name in sides}, lambda: float(control.ask("sgemm"))
        )


def totals(parts: Sequence[Sequence[int]], lengths: Sequence[int]) -> list[int]:
    """Tokens of each part. Raises ConfigError unless every sequence is in exactly one."""
    if sorted(index for part in parts for index in part) != list(range(len(lengths))):
        raise ConfigError("every sequence must be in exactly one part: these parts are no partition")
    return [sum(lengths[index] for index in part) for part in parts]


def excess(sums: Sequence[int]) -> int:
    """Micro-batches above the minimum that the tokens need."""
    return len(sums) + sum(sums) // -CAPACITY


def spread(sums: Sequence[int]) -> float:
    """Heaviest less lightest rank, over the mean."""
    return (max(sums) - min(sums)) * len(sums) / sum(sums)


def packed_figures(task: PackTask) -> Figures:
    mine, theirs = (list(map(excess, task.totals[name])) for name in (OURS, AREAL))
    return {
        "n": N,
        "capacity": CAPACITY,
        "lengths": f"log-normal, median {MEDIAN:g}, sigma {SIGMA:g}, at most {LONGEST}",
        "ms_8192": round(1e3 * task.rounds.cost(OURS), 3),
        "ms_8192_worst": round(1e3 * max(costs[OURS] for costs in task.rounds.costs), 3),
        "excess_bins_8192": max(mine),
        "areal_ms_8192": round(1e3 * task.rounds.cost(AREAL), 3),
        "areal_excess_bins_8192": max(theirs),
        **task.rounds.against(AREAL),
    }


def shared_figures(task: PackTask) -> Figures:
    mine, theirs = (list(map(spread, task.totals[name])) for name in (OURS, AREAL))
    return {
        "ranks": RANKS,
        "balance_spread": round(max(mine), 7),
        "balance_ms": round(1e3 * task.rounds.cost(OURS), 3),
        "areal_balance_spread": round(max(theirs), 7),
        "areal_balance_ms": round(1e3 * task.rounds.cost(AREAL), 3),
        **task.rounds.against(AREAL, "balance_ratio"),
    }
