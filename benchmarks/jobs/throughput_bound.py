"""Bench `bound`: a whole job beside its bound, the slower of its halves, each measured alone in the same rounds.

Like `async`, with fewer slots, smaller batches and shorter lengths. The shape is fixed, so every machine does the same
work; `balance` reports how uneven the halves were.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from benchmarks.harness import pace, worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import Rounds, interleave, sure
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import async_speedup, workload
from benchmarks.jobs.async_speedup import LAP, SETTLE
from benchmarks.jobs.paused_jobs import lanes

WORKLOAD = replace(async_speedup.WORKLOAD, shape=(192, 6, 6), median=100.0, longest=1200, batch_size=32, n_slots=32)
BALANCE = 1.4  # with very uneven halves the bound is too easy to reach
ETAS = (1, 2, 4)
ROUNDS, ATTEMPTS = 11, 20  # on a shared machine the noise of a lap is as large as the effect
AT = 2  # eta of the reported figure
REACHES = 0.95
HALVES = ("generation", "training")


class Bound:
    about = "a whole job's throughput over the slower of generation and training alone, and the lag it takes"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without mpirun, on a machine that swings, and when the halves are not balanced."""
        began = time.monotonic()
        with (
            workload.folder("bound") as folder,
            worker_process.ours("jobs.halves_alone") as alone,
            on_both_cores(of_jobs=True) as control,
        ):
            etas = pace.of(ETAS, (AT,))
            made = workload.PreparedWorkload(WORKLOAD, folder / "workload", alone)
            workload.warm(made, alone)
            jobs = {
                f"eta{eta}": made.job(f"eta{eta}", f"rollout.max_head_offpolicyness={eta}", quiet=quiet) for eta in etas
            }
            settle = {f"eta{eta}": SETTLE + eta for eta in etas}
            with lanes(jobs, settle) as running:
                laps = {name: workload.running(lane, LAP) for name, lane in running.items()}
                rounds = interleave(
                    laps | workload.beside(made, alone), control, rounds=ROUNDS, attempts=ATTEMPTS, quick=6
                )
                updates = {name: lane.updates[settle[name] :] for name, lane in running.items()}
        figures: Figures = {"bench": "bound"}
        workload.check_balance(rounds, within=BALANCE, mend="another shape in throughput_bound.py")
        for name in jobs:
            figures |= share(rounds, name) | workload.of_updates(name, updates[name])
        figures |= {
            "share": figures[f"share_eta{AT}"],
            "share_low": figures[f"share_eta{AT}_low"],
            "share_high": figures[f"share_eta{AT}_high"],
            "share_sure_low": figures[f"share_eta{AT}_sure_low"],
            "share_sure_high": figures[f"share_eta{AT}_sure_high"],
        }
        figures |= smallest(figures)
        figures |= rounds.against("training", "balance", to="generation")
        figures |= workload.tokens_per_s(rounds, [*jobs, *HALVES])
        return figures | made.figures() | rounds.figures() | {"seconds": round(time.monotonic() - began, 1)}


def share(rounds: Rounds, name: str) -> Figures:
    """Throughput over the bound of the same round: the halves' larger cost over the job's; at least six rounds."""
    each = [max(costs[half] for half in HALVES) / costs[name] for costs in rounds.costs]
    low, high = sure(each)
    return {
        f"share_{name}": round(median(each), 3),
        f"share_{name}_low": round(min(each), 3),
        f"share_{name}_high": round(max(each), 3),
        f"share_{name}_sure_low": round(low, 3),
        f"share_{name}_sure_high": round(high, 3),
    }


def smallest(figures: Mapping[str, float | int | str | bool | None]) -> Figures:
    """The smallest eta that reaches REACHES of the bound, and its mean lag; None where none does."""
    for eta in ETAS:
        reached = figures.get(f"share_eta{eta}")
        if isinstance(reached, float) and reached >= REACHES:
            return {"smallest_eta": eta, "mean_lag": figures[f"eta{eta}_lag_mean"]}
    return {"smallest_eta": None, "mean_lag": None}
