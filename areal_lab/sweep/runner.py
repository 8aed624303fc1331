"""Runs the jobs of a sweep, several at once, each in processes of its own. A killed sweep goes on where it was."""

import shutil
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import fsum
from pathlib import Path
from typing import Protocol

from actors.runtime.process import signal_name
from areal_bus.errors import ConfigError
from areal_lab.sweep.plan import Job, SweepFile
from areal_lab.sweep.results import Result, ResultFile, read_result
from areal_lab.sweep.starting import JobStart, JobStarter, log_of, start_of


class SweepProgress:
    """Counts jobs and their durations. Jobs of one kind are taken to last equally long."""

    def __init__(self, n_jobs: int, *, n_cores: int) -> None:
        self.n_jobs, self.n_done = n_jobs, 0
        self._n_cores = n_cores
        self._durations: dict[int, list[float]] = defaultdict(list)  # cores of a job -> seconds

    def add(self, cores: int, wall_s: float, *, is_done: bool) -> None:
        """A job on this number of cores has ended. The duration of one that failed says nothing on the others."""
        self.n_done += 1
        if is_done:
            self._durations[cores].append(wall_s)

    def left_s(self, waiting: Iterable[int], running: Iterable[tuple[int, float]]) -> float | None:
        """Seconds to the end; None before a job is done. `waiting`: cores of each job. `running`: cores and
        seconds since the start.
        """
        if not self._durations:
            return None
        parts = [(cores, max(self._mean(cores) - elapsed, 0.0)) for cores, elapsed in running]
        work = fsum(cores * s for cores, s in [*parts, *((cores, self._mean(cores)) for cores in waiting)])
        return max([work / self._n_cores, *(s for _, s in parts)])

    def _mean(self, cores: int) -> float:
        known = self._durations.get(cores) or [s for durations in self._durations.values() for s in durations]
        return fsum(known) / len(known)


POLL_S = 0.1
GRACE_S = 10.0  # for a job to end after SIGTERM
SHOW_S = 60.0  # between two reports of running jobs
OF_A_SHELL = 128  # exit code of a process whose child ended by signal N: 128 + N


class SweepView(Protocol):
    """What a sweep shows while it runs."""

    def ended(self, job: Job, result: Result, progress: SweepProgress, left_s: float | None) -> None: ...

    def running(self, job: Job, elapsed_s: float, line: str) -> None:
        """`line`: the last one that the job printed."""


@dataclass(slots=True)
class RunningJob:
    """A job that has started."""

    job: Job
    cores: int
    folder: Path
    process: "subprocess.Popen[bytes]"
    began: float

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.began


class SweepRunner:
    """Starts jobs on `n_cores` cores, in order, and keeps their results."""

    def __init__(self, sweep: SweepFile, out: Path, *, n_cores: int, keep: bool, view: SweepView) -> None:
        """`keep`: keep the folders of finished jobs."""
        self._sweep, self._out, self._n_cores, self._keep, self._view = sweep, out, n_cores, keep, view
        self.results = ResultFile(out / "results.jsonl")
        self._starter = JobStarter(out, ranks=sweep.ranks)
        self._running: list[RunningJob] = []

    def run(self, jobs: Sequence[Job]) -> dict[str, Result]:
        """Run the jobs without a result; returns the results of all. Ends the running jobs on an exception."""
        try:
            return self._run(jobs)
        finally:
            self._stop()

    def _run(self, jobs: Sequence[Job]) -> dict[str, Result]:
        known = self.results.read()
        found = {job.digest: known[job.digest] for job in jobs if is_done(known.get(job.digest))}
        starts = {job.digest: start_of(job, ranks=self._sweep.ranks) for job in jobs}
        cores = {digest: min(start.n_cores, self._n_cores) for digest, start in starts.items()}
        progress = SweepProgress(len(jobs), n_cores=self._n_cores)
        for digest, result in found.items():
            progress.add(cores[digest], result.wall_s, is_done=True)
        waiting = [job for job in jobs if job.digest not in found]
        shown = time.monotonic()
        while waiting or self._running:
            while waiting and self._n_free >= cores[waiting[0].digest]:
                job = waiting.pop(0)
                self._running.append(self._start(job, starts[job.digest], cores[job.digest]))
            for one in [one for one in self._running if one.process.poll() is not None]:
                self._running.remove(one)
                result = found[one.job.digest] = self._finish(one)
                progress.add(one.cores, result.wall_s, is_done=is_done(result))
                running = [(other.cores, other.elapsed_s) for other in self._running]
                left_s = progress.left_s([cores[job.digest] for job in waiting], running)
                self._view.ended(one.job, result, progress, left_s)
                shown = time.monotonic()
            if time.monotonic() - shown >= SHOW_S:
                shown = time.monotonic()
                for one in self._running:
                    self._view.running(one.job, one.elapsed_s, last_line(log_of(one.folder)))
            time.sleep(POLL_S)
        return found

    @property
    def _n_free(self) -> int:
        """Cores without a job."""
        return self._n_cores - sum(one.cores for one in self._running)

    def _start(self, job: Job, start: JobStart, cores: int) -> RunningJob:
        folder = self._out / "runs" / job.name
        shutil.rmtree(folder, ignore_errors=True)  # of a job that was killed
        return RunningJob(job, cores, folder, self._starter.start(job, start, folder), time.monotonic())

    def _finish(self, running: RunningJob) -> Result:
        job, code, wall_s = running.job, running.process.returncode, running.elapsed_s
        log = log_of(running.folder)
        try:
            if code:
                raise ConfigError(f"{named(code)}: {last_line(log)}")
            result = read_result(job, running.folder, metric=self._sweep.metric, wall_s=wall_s)
        except ConfigError as error:
            result = Result(job.digest, dict(job.cell), job.seed, error=f"{error} ({log})", wall_s=round(wall_s, 1))
        self.results.add(result)
        if not self._keep and not result.error:
            shutil.rmtree(running.folder)
            log.unlink()
        return result

    def _stop(self) -> None:
        """End the running jobs, then the server."""
        for running in self._running:
            running.process.terminate()
        for running in self._running:
            try:
                running.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                running.process.kill()
                running.process.wait()
        self._starter.close()


def is_done(result: Result | None) -> bool:
    """Failed jobs run again."""
    return result is not None and not result.error


def named(code: int) -> str:
    """An exit code; a signal by its name."""
    number = -code if code < 0 else code - OF_A_SHELL
    if number in {int(known) for known in signal.valid_signals()}:
        return f"killed by {signal_name(number)}"
    return f"exit code {code}"


def last_line(log: Path) -> str:
    """The last line of a job's output that names an error, else the last one that is not empty."""
    lines = [line.strip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if "error:" in line]
    return (errors or lines or ["it printed nothing"])[-1]
