"""Bench `simulate`: whole jobs of the simulated engine at several etas, beside the simulator's predictions.

Speeds and lengths are measured at eta 0 only, where the number of live samples varies; the other etas are predicted.
"""

import subprocess
import time
from collections.abc import Mapping

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tools.bench.harness.protocol import Figures
from tools.bench.jobs import workload
from tools.bench.jobs.real_job import KilledJob
from tools.run import Run
from tools.simulate.__main__ import compare_with_run
from tools.simulate.calibration import Measured, config_of, measure

CONFIG, RANKS = "configs/simulated.toml", 8
ETAS = (0, 1, 2, 4)
COUNTED = 14  # measured updates of each job, at least
STEPS = 100  # simulated updates
PATIENCE_S = 600.0


class SimulateBench:
    about = "predicted over measured tokens a second of jobs with the simulated engine; calibrated at eta 0 only"

    def measure(self, *, quiet: bool) -> Figures:
        """One job after the other. Raises ConfigError without mpirun, or when one does not end well."""
        began = time.monotonic()
        with workload.folder("simulate") as folder:
            seen = {}
            for eta in ETAS:
                changes = (f"rollout.max_head_offpolicyness={eta}", f"run.total_train_steps={COUNTED + 4 + eta}")
                job = KilledJob(folder / f"eta{eta}", config=CONFIG, changes=changes, ranks=RANKS, quiet=quiet)
                with job.started():
                    ended(job)
                where = Run(job.run)
                config = config_of(where)
                seen[eta] = measure(where, config)
        return figures(config, seen) | {"seconds": round(time.monotonic() - began, 1)}


def ended(job: KilledJob) -> None:
    """Raises ConfigError unless the job ends with success within PATIENCE_S."""
    try:
        if job.process is not None:
            job.process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"a job of {CONFIG} ends within {PATIENCE_S:g} s: {job.run} has not") from None
    job.finish()


def figures(config: Config, seen: Mapping[int, Measured]) -> Figures:
    """`error_etaN` is simulated over measured throughput, minus 1; `errors` is the largest absolute value."""
    each = {eta: compare_with_run(config, seen[0], measured, eta=eta, n_steps=STEPS) for eta, measured in seen.items()}
    found: Figures = {"bench": "simulate", "errors": round(max(abs(one.error) for one in each.values()), 3)}
    for eta, one in each.items():
        found |= {
            f"error_eta{eta}": round(one.error, 3),
            f"tokens_per_s_eta{eta}": round(one.measured, 1),
            f"simulated_eta{eta}": round(one.simulated.tokens_per_s, 1),
            f"updates_eta{eta}": one.n_updates,
        }
    return found
