"""Bench `interrupt`: interrupted over drained generation, in jobs that differ in how an update treats running samples.

Generation is the bottleneck: few rows of a model with weights larger than the cache. Every other group has no signal
(its prompt is too hard or too easy), so it needs no gradient. A batch has as many samples as there are slots, so an
update comes about once in the mean time of a sample. "drain" waits for running samples and starts no others
meanwhile.
"""

import time
from collections.abc import Sequence
from statistics import median

from areal_bus.errors import ConfigError
from benchmarks.harness import worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import interleave
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import workload
from benchmarks.jobs.paused_jobs import lanes
from tools.run import Line

MODES = ("recompute", "keep", "drain")
ETA = 8  # large, so that hardly any token is too old to train
WORKLOAD = workload.Workload(
    shape=(448, 6, 14), median=64.0, sigma=1.0, longest=480, batch_size=2, n_samples=2, n_slots=4, n_flat=2
)
LOOKS = 5
SETTLE = ETA + 12
LAP = 24
ATTEMPTS = 8


class Interrupt:
    about = "interrupted generation (keys recomputed, or kept) over drained, generation-bound, an update a mean length"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without mpirun, on a machine that swings, and when training is the slower half."""
        began = time.monotonic()
        with (
            workload.folder("interrupt") as folder,
            worker_process.ours("jobs.halves_alone") as alone,
            on_both_cores(of_jobs=True) as control,
        ):
            made = workload.PreparedWorkload(WORKLOAD, folder / "workload", alone)
            check_bound(looked_at(made, alone))
            eta = f"rollout.max_head_offpolicyness={ETA}"
            jobs = {mode: made.job(mode, eta, f'rollout.on_update="{mode}"', quiet=quiet) for mode in MODES}
            with lanes(jobs, dict.fromkeys(jobs, SETTLE)) as running:
                laps = {mode: workload.running(lane, LAP) for mode, lane in running.items()}
                halves = workload.beside(made, alone) | {"prefill": lambda: float(alone.ask("prefill"))}
                rounds = interleave(laps | halves, control, attempts=ATTEMPTS)
                updates = {mode: lane.updates[SETTLE:] for mode, lane in running.items()}
        bound_by = check_bound(rounds.ratio("generation", to="training").median)
        figures: Figures = {"bench": "interrupt"}
        for mode in ("keep", "recompute"):
            figures |= rounds.against("drain", f"ratio_{mode}", to=mode)
        figures |= rounds.against("generation", "prefill_over_decode", to="prefill")
        figures |= {"generation_over_training": round(bound_by, 3), "eta": ETA}
        figures |= workload.tokens_per_s(rounds, [*jobs, "generation", "training", "prefill"])
        for mode, lines in updates.items():
            figures |= workload.of_updates(mode, lines)
            lengths = lengths_an_update(made, rounds.cost("generation"), rounds.cost(mode), lines)
            figures[f"{mode}_mean_lengths_an_update"] = round(lengths, 2)
        return figures | made.figures() | rounds.figures() | {"seconds": round(time.monotonic() - began, 1)}


def looked_at(made: workload.PreparedWorkload, alone: worker_process.Side) -> float:
    """Cost of generation over that of training, each alone: seen before jobs are begun."""
    workload.warm(made, alone)
    halves = workload.beside(made, alone)
    generation, training = (median(halves[half]() for _ in range(LOOKS)) for half in ("generation", "training"))
    return generation / training


def check_bound(by: float) -> float:
    """Raises ConfigError when generation takes no longer than training."""
    if by <= 1:
        raise ConfigError(f"generation must be the slower half here: it takes {by:.2f} of training's time")
    return by


def lengths_an_update(
    made: workload.PreparedWorkload, generation: float, cost: float, updates: Sequence[Line]
) -> float:
    """Mean time between updates over the time of a sample of mean length, decoded with all slots full."""
    sample_s = made.mean * made.workload.n_slots * generation
    return cost * workload.n_young(updates) / len(updates) / sample_s
