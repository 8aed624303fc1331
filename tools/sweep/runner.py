"""Runs the jobs of a sweep, several at once, each in processes of its own. A killed sweep goes on where it was."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.process.isolation import CHILD, child_path
from areal_bus.process.mpirun import find_mpirun, mpirun_variables
from areal_bus.process.parent_death import die_with_parent
from tools.sweep.plan import Job, SweepFile
from tools.sweep.results import Result, ResultFile, read_result

POLL_S = 0.1
GRACE_S = 10.0  # for a job to end after SIGTERM

Show = Callable[["Progress", Result, Job], None]


@dataclass(slots=True)
class Progress:
    """How far a sweep is, and how long it still takes."""

    n_jobs: int
    n_done: int
    n_workers: int
    durations: list[float] = field(default_factory=list)  # of the jobs of this start, seconds

    @property
    def left_s(self) -> float | None:
        """Seconds to the end, from the mean duration so far; None before the first job ended."""
        if not self.durations:
            return None
        mean = sum(self.durations) / len(self.durations)
        return mean * (self.n_jobs - self.n_done) / self.n_workers


@dataclass(slots=True)
class _Running:
    job: Job
    folder: Path
    process: subprocess.Popen[bytes]
    began: float


class SweepRunner:
    """Starts jobs, at most `n_workers` at once, and keeps their results."""

    def __init__(self, sweep: SweepFile, out: Path, *, n_workers: int, keep: bool, show: Show) -> None:
        """`keep`: keep the folders of finished jobs. `show` is called after each job."""
        self._sweep, self._out, self._n_workers, self._keep, self._show = sweep, out, n_workers, keep, show
        self.results = ResultFile(out / "results.jsonl")
        self._running: list[_Running] = []

    def run(self, jobs: Sequence[Job]) -> dict[str, Result]:
        """Run the jobs without a result; returns the results of all. Ends the running jobs on an exception."""
        known = self.results.read()
        found = {job.digest: known[job.digest] for job in jobs if is_done(known.get(job.digest))}
        waiting = [job for job in jobs if job.digest not in found]
        progress = Progress(len(jobs), len(found), self._n_workers)
        try:
            while waiting or self._running:
                while waiting and len(self._running) < self._n_workers:
                    self._running.append(self._start(waiting.pop(0)))
                for running in [running for running in self._running if running.process.poll() is not None]:
                    self._running.remove(running)
                    result = found[running.job.digest] = self._finish(running)
                    progress.n_done += 1
                    progress.durations.append(result.wall_s)
                    self._show(progress, result, running.job)
                time.sleep(POLL_S)
        finally:
            self._stop()
        return found

    def _start(self, job: Job) -> _Running:
        folder = self._out / "runs" / job.name
        shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed
        folder.parent.mkdir(parents=True, exist_ok=True)
        log = (folder.parent / f"{job.name}.log").open("wb")
        with log:
            process = subprocess.Popen(
                self._command(job, folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                preexec_fn=partial(die_with_parent, os.getpid()),  # this process has one thread
            )
        return _Running(job, folder, process, time.monotonic())

    def _command(self, job: Job, folder: Path) -> list[str]:
        options = [word for option in job.options for word in ("--set", option)]
        if (loop := loop_of(job)) is not None:
            program = [*CHILD, loop, str(job.config), "--out", str(folder)]
            return [*program, "--warm-ups", str(self._out / "warm-ups"), *options]
        options += ["--set", f"run.folder={folder.parent}", "--set", f"run.name={folder.name}"]
        program = [find_mpirun(), "-np", str(self._sweep.ranks), *CHILD, "areal_bus.launch", str(job.config)]
        return [*program, *options]

    def _finish(self, running: _Running) -> Result:
        job, code, wall_s = running.job, running.process.returncode, time.monotonic() - running.began
        log = running.folder.parent / f"{job.name}.log"
        try:
            if code:
                raise ConfigError(f"exit code {code}: {last_line(log)}")
            result = read_result(job, running.folder, metric=self._sweep.metric, wall_s=wall_s)
        except ConfigError as error:
            result = Result(job.digest, dict(job.cell), job.seed, error=f"{error} ({log})", wall_s=round(wall_s, 1))
        self.results.add(result)
        if not self._keep and not result.error:
            shutil.rmtree(running.folder)
            log.unlink()
        return result

    def _stop(self) -> None:
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            try:
                running.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()


def loop_of(job: Job) -> str | None:
    """Module of the loop in one process that runs this job; None for a ring."""
    config = job.load()
    if config.virtual_time.seconds is not None:
        return "actors.offline.virtual_time"
    return "actors.offline.exact_lag" if config.rollout.lags else None


def is_done(result: Result | None) -> bool:
    """Failed jobs run again."""
    return result is not None and not result.error


def last_line(log: Path) -> str:
    """The last line of a job's output that is not empty."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or ["it printed nothing"])[-1]


def environment() -> dict[str, str]:
    """This environment with our packages first and one thread a process, so that results repeat bit for bit."""
    variables = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "PYTHONPATH": child_path()}
    return {**os.environ, **mpirun_variables(), **variables}
