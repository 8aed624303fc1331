"""Bench `async`: whole jobs of one generator and one learner at eta 1, 2 and 4, beside eta 0.

Two synchronous settings: the same two processes in turn; and two generators, then two learner ranks, so that both cores
generate and then both train. These sample a whole batch at once, which suits them best.
"""

import time

from benchmarks.harness import pace, worker_process
from benchmarks.harness.control import on_both_cores
from benchmarks.harness.interleave import interleave
from benchmarks.harness.protocol import Figures
from benchmarks.jobs import workload
from benchmarks.jobs.paused_jobs import lanes

ETAS = (1, 2, 4)
WORKLOAD = workload.Workload(
    shape=(192, 6, 6), median=130.0, sigma=1.0, longest=1560, batch_size=64, n_samples=8, n_slots=48
)
SETTLE = 2  # updates before the first lap, and eta more
LAP = 1  # updates of a lap
ATTEMPTS = 8


class Asynchrony:
    about = "whole jobs at eta 1, 2, 4 over the synchronous ones, generation and training balanced, lengths log-normal"

    def measure(self, *, quiet: bool) -> Figures:
        """Raises ConfigError without mpirun, on a machine that swings, and when the halves are not balanced."""
        began = time.monotonic()
        with (
            workload.folder("async") as folder,
            worker_process.ours("jobs.halves_alone") as alone,
            on_both_cores(of_jobs=True) as control,
        ):
            etas = pace.of(ETAS, ETAS[:1])
            made = workload.balanced(WORKLOAD, folder, alone)
            at_once = f"rollout.max_concurrent_rollouts={WORKLOAD.n_batch}"
            sync = ("rollout.max_head_offpolicyness=0", at_once)
            jobs = {
                "eta0": made.job("eta0", *sync, quiet=quiet),
                "all": made.job("all", *sync, "topology.learners=2", ranks=4, quiet=quiet),
            }
            for eta in etas:
                jobs[f"eta{eta}"] = made.job(f"eta{eta}", f"rollout.max_head_offpolicyness={eta}", quiet=quiet)
            settle = dict.fromkeys(jobs, SETTLE) | {f"eta{eta}": SETTLE + eta for eta in etas}
            with lanes(jobs, settle) as running:
                laps = {name: workload.running(lane, LAP) for name, lane in running.items()}
                rounds = interleave(laps | workload.beside(made, alone), control, attempts=ATTEMPTS)
                updates = {name: lane.updates[settle[name] :] for name, lane in running.items()}
        figures: Figures = {"bench": "async"}
        for eta in etas:
            figures |= rounds.against("eta0", f"ratio_eta{eta}", to=f"eta{eta}")
            figures |= rounds.against("all", f"ratio_all_eta{eta}", to=f"eta{eta}")
        figures |= rounds.against("training", "balance", to="generation")
        workload.check_balance(rounds)
        figures |= workload.tokens_per_s(rounds, [*jobs, "generation", "training"])
        for name, lines in updates.items():
            figures |= workload.of_updates(name, lines)
        return figures | made.figures() | rounds.figures() | {"seconds": round(time.monotonic() - began, 1)}
