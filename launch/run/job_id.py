"""Names a launch by the environment that its launcher sets. Imports the standard library only."""

import hashlib
from collections.abc import Mapping

LAUNCHERS = ("PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "PMI_JOBID")
TORCHRUN = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
NO_RUN_ID = "none"  # torchrun without --rdzv-id: the same for all jobs, which differ in the port
DIGITS = 16
SLURM_JOB = "slurm_job"  # in RUN/origin.json


def job_id(environ: Mapping[str, str], *, alone: str) -> str:
    """A unique id of a launch, the same for its ranks on this host. `alone`: its name if no launcher names it."""
    names = [name for name in LAUNCHERS if name in environ]
    run = environ.get(TORCHRUN[0], NO_RUN_ID)
    if run != NO_RUN_ID or (TORCHRUN[0] in environ and "MASTER_PORT" in environ):
        names += [name for name in TORCHRUN if name in environ]
    known = [f"{name}={environ[name]}" for name in names] or [alone]
    return hashlib.sha256("\n".join(known).encode()).hexdigest()[:DIGITS]


def slurm_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The Slurm job of a start, for RUN/origin.json; {} without Slurm."""
    return {SLURM_JOB: environ["SLURM_JOB_ID"]} if "SLURM_JOB_ID" in environ else {}
