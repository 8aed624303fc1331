"""Starts the process of a job: a fork of the job server, a process of its own, or a ring under mpirun.

A loop in one process is forked from a process that has imported everything. With GPUs it starts by itself, because
CUDA does not survive a fork. A ring starts its ranks with launch.start = "fork" where the config leaves it the choice.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO

from areal_bus.config.names import named_tasks
from areal_bus.config.sections import Config, LaunchConfig
from areal_bus.process.commands import find_mpirun, mpirun_variables
from areal_bus.process.isolation import CHILD, child_path
from areal_bus.process.parent_death import die_with_parent
from areal_lab.settings import LabConfig
from areal_lab.sweep.job_server import JobServer
from areal_lab.sweep.plan import Job

FORKED_RING = {"launch.start": "fork", "launch.bootstrap": "env"}


@dataclass(frozen=True, slots=True)
class JobStart:
    """How a job starts."""

    loop: str | None  # module of the loop in one process; None for a ring
    is_forked: bool
    n_cores: int


def start_of(job: Job, *, ranks: int) -> JobStart:
    """`ranks`: of a ring."""
    config = job.load()
    loop = loop_of(config)
    if loop is not None:
        return JobStart(loop, is_forked=not config.topology.gpus_per_host, n_cores=1)
    default = LaunchConfig()
    has_choice = (config.launch.start, config.launch.bootstrap) == (default.start, default.bootstrap)
    is_forked = has_choice and not FORKED_RING.keys() & job.keys.keys() and not config.topology.gpus_per_host
    return JobStart(None, is_forked, ranks)


def loop_of(config: LabConfig) -> str | None:
    """Module of the loop in one process that runs this config; None for a ring."""
    if config.virtual_time.seconds is not None:
        return "areal_lab.loops.virtual_time"
    return "areal_lab.loops.exact_lag" if config.lags else None


def modules_of(config: Config) -> list[str]:
    """What a loop imports late and slowly with these settings."""
    return ["actors.rewards.functions.reasoning"] if named_tasks.gym_task(config.data.task) else []


class JobStarter:
    """Starts jobs. The job server starts with the first job that is forked from it."""

    def __init__(self, out: Path, *, ranks: int) -> None:
        """`out`: folder of the sweep. `ranks`: of a ring."""
        self._out, self._ranks = out, ranks
        self._server: JobServer | None = None
        self._is_lost = False  # the server

    def start(self, job: Job, start: JobStart, folder: Path) -> "subprocess.Popen[bytes]":
        """Start a job with a new `folder`. Its output goes to FOLDER.log. It ends with this process."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with log_of(folder).open("wb") as log:
            return start_process(self._command(job, start, folder), log)

    def close(self) -> None:
        """End the job server."""
        if self._server is not None:
            self._server.close()

    def _command(self, job: Job, start: JobStart, folder: Path) -> list[str]:
        if start.loop is not None:
            program = self._server_program(job) if start.is_forked else list(CHILD)
            words = [start.loop, str(job.config), "--out", str(folder), "--warm-ups", str(self._out / "warm-ups")]
            return [*program, *words, *as_options(job.options)]
        forks = [f"{key}={value}" for key, value in FORKED_RING.items()] if start.is_forked else []
        names = [f"run.folder={folder.parent}", f"run.name={folder.name}"]
        return ring_command([str(job.config), *as_options([*job.options, *forks, *names])], ranks=self._ranks)

    def _server_program(self, job: Job) -> list[str]:
        """Of a job that is forked; once the server is lost, jobs start by themselves."""
        if self._server is None:
            self._server = JobServer(environment(), modules_of(job.load()))
        code = self._server.exit_code
        if code is not None and not self._is_lost:
            self._is_lost = True
            lost = f"the process from which jobs are forked has ended (exit code {code})"
            print(f"warning: {lost}: each further job imports by itself", file=sys.stderr, flush=True)
        return list(CHILD) if self._is_lost else self._server.program


def ring_command(words: Sequence[str], *, ranks: int) -> list[str]:
    """A ring under mpirun. `words`: as after `areal-bus launch`. Raises ConfigError without mpirun."""
    return [find_mpirun(), "-np", str(ranks), *CHILD, "areal_bus.launch", *words]


def start_process(command: Sequence[str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a job. Its output goes to the log. It ends with this process."""
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=environment(),
        preexec_fn=partial(die_with_parent, os.getpid()),  # this process has one thread
    )


def log_of(folder: Path) -> Path:
    """The output of the job with this folder."""
    return folder.with_name(f"{folder.name}.log")


def as_options(settings: Sequence[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def environment() -> dict[str, str]:
    """This environment with our packages first and one thread a process, so that results repeat bit for bit."""
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": child_path()}
    return {**os.environ, **mpirun_variables(), **variables}
