"""Benches `e2e` and `e2e-core`: the whole system beside TRL's GRPOTrainer on two cores, in tokens trained a second.

Our side is a job under mpirun. TRL's side is one process, with one thread and with two; the faster one counts. Each
side is paused while the other is measured. `e2e` reports wall time, `e2e-core` the CPU time of the same measurements.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from areal_bus.errors import ConfigError
from benchmarks.e2e.job import ETA, ON_UPDATE, ROWS, E2eJob, Spent
from benchmarks.e2e.setting import GROUPS, N_NEW, SAMPLES, TOKENS
from benchmarks.harness import pace, worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import OURS, Rounds, interleave
from benchmarks.harness.protocol import Figures
from benchmarks.harness.worker_process import Side

CORES = 2
THREADS = (1, 2)  # of TRL
OUR_STEPS, PEER_STEPS = 16, 2  # of one measurement, a few seconds each
CLOCKS = ("wall", "core")

Taken = dict[tuple[str, float], Spent]  # by side and wall seconds a token


@dataclass(frozen=True, slots=True)
class E2e:
    """One measurement, reported under two names; `clock` chooses the clock of `ratio`."""

    about: str
    bench: str
    clock: str

    def measure(self, *, quiet: bool) -> Figures:
        """Both rows. Raises ConfigError without the peers, without mpirun, or when a side ran another step."""
        measured: dict[str, dict[str, Rounds]] = {}
        with two_cores() as cores, tempfile.TemporaryDirectory(prefix="e2e-") as place:
            folder = Path(place)
            with worker_process.ours("e2e.ours") as ours:
                n_parameters = ours.ask("write", folder=str(folder / "model"))
            rows = pace.of(list(ROWS), list(ROWS)[:1])
            for number, row in enumerate(rows, start=1):
                pace.say(number, len(rows), f"row {row or 'plain'}:")
                measured[row] = compare(folder, row, quiet=quiet)
        about: Figures = {
            "bench": self.bench,
            "parameters": n_parameters,
            "cores": cores,
            "eta": ETA,
            "on_update": ON_UPDATE,
        }
        about |= {"groups": GROUPS, "samples": SAMPLES, "new_tokens": N_NEW, "tokens_per_step": TOKENS}
        return about | figures(measured, self.clock)


@contextmanager
def two_cores() -> Iterator[int]:
    """Pin this process and its children to two cores. Returns the number of cores."""
    all_of_them = os.sched_getaffinity(0)
    chosen = set(sorted(all_of_them)[:CORES])
    if len(chosen) < CORES:
        raise ConfigError(f"this bench needs {CORES} cores: there is {len(chosen)}")
    os.sched_setaffinity(0, chosen)
    try:
        yield len(chosen)
    finally:
        os.sched_setaffinity(0, all_of_them)


def compare(folder: Path, row: str, *, quiet: bool) -> dict[str, Rounds]:
    """The rounds of one row by both clocks."""
    taken: Taken = {}
    with ExitStack() as stack:
        control = stack.enter_context(on_both_cores())
        peers = {f"trl-{n}": stack.enter_context(worker_process.peer("e2e.trl")) for n in THREADS}
        for n, peer in zip(THREADS, peers.values(), strict=True):
            out = str(folder / f"trl-{n}")
            peer.begin("begin", folder=str(folder / "model"), out=out, threads=n, recompute=bool(row))
        for peer in peers.values():
            peer.answer()
        ring = stack.enter_context(E2eJob(folder, row, quiet=quiet).started())

        def measure(name: str) -> float:
            spent = ring.measure(OUR_STEPS) if name == OURS else ask(peers[name])
            cost = spent.wall_s / spent.n_tokens
            taken[name, cost] = spent
            return cost

        sides = {name: partial(measure, name) for name in (OURS, *peers)}
        wall = interleave(sides, control)
    return {"wall": wall, "core": by_cpu(wall, taken)}


def ask(peer: Side) -> Spent:
    return Spent(**peer.ask("steps", n=PEER_STEPS))


def by_cpu(wall: Rounds, taken: Taken) -> Rounds:
    """The same rounds, the cost being CPU seconds a token."""

    def costs(of_round: Mapping[str, float]) -> Mapping[str, float]:
        spent = {name: taken[name, cost] for name, cost in of_round.items()}
        return {name: one.cpu_s / one.n_tokens for name, one in spent.items()}

    return replace(wall, costs=tuple(costs(of_round) for of_round in wall.costs))


def figures(measured: Mapping[str, Mapping[str, Rounds]], named: str) -> Figures:
    """Keys without prefix or suffix: plain row, clock `named`. The other clock is a prefix, another row a suffix."""
    found: Figures = {}
    for row, clocks in measured.items():
        for clock in sorted(CLOCKS, key=lambda clock: clock != named):
            prefix = "" if clock == named else f"{clock}_"
            suffix = f"_{row}" if row else ""
            found |= {f"{prefix}{key}{suffix}": value for key, value in row_figures(clocks[clock]).items()}
    first = next(iter(measured.values()))["wall"]
    refused = sum(clocks["wall"].refused for clocks in measured.values())
    return found | first.figures() | {"refused": refused}


def row_figures(rounds: Rounds) -> Figures:
    """Ratios against TRL at its faster thread count, and the tokens a second of each side."""
    peers = [name for name in rounds.costs[0] if name != OURS]
    best = min(peers, key=rounds.cost)
    return {
        **rounds.against(best),
        "tokens_per_s": round(1 / rounds.cost(OURS)),
        "peer_tokens_per_s": round(1 / rounds.cost(best)),
        "peer_threads": int(best.rpartition("-")[2]),
        **{f"{name.replace('-', '_')}_tokens_per_s": round(1 / rounds.cost(name)) for name in peers},
    }


WALL = E2e("the whole job beside TRL's GRPOTrainer on 2 cores: tokens trained a wall second", "e2e", "wall")
CORE = E2e("the same job beside TRL: tokens trained a CPU second, over all processes", "e2e-core", "core")
