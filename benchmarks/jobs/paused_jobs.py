"""Measures whole jobs in turn: one runs while the others are paused by SIGSTOP.

Each round has every setting in its steady state, without a restart. A job is paused when its newest version is
published and no push is in flight, because torch's deadlines continue during the pause. Our own deadlines are long
enough.
"""

import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_bus.storage.journal_segments import exists
from benchmarks.jobs.real_job import KilledJob
from tools.follow import Place
from tools.run import Line

PATIENT = (
    "bus.silent_s=36000.0",
    "reward.timeout_s=36000.0",
    "weights.timeout_s=3600.0",
    "watchdog.stall_s=36000.0",
    "watchdog.progress_s=36000.0",
    "watchdog.act_s=36000.0",
)
LOOK_S = 0.1  # polling more often would take CPU from the job
PATIENCE_S = 300.0  # for one update


class Lane:
    """The job of one setting, with a clock that excludes its pauses."""

    def __init__(self, job: KilledJob) -> None:
        self._job = job
        self._stops: list[list[float]] = []  # [stopped, continued] of finished pauses
        self._stopped_at: float | None = None
        self._path = job.run / "journal" / "head-0.0.jsonl"
        self._place = Place()
        self._published = 0
        self.updates: list[Line] = []  # each with its clock in "clock_s"

    @contextmanager
    def started(self, n_updates: int) -> Iterator["Lane"]:
        """The job, paused after its first updates; ended afterwards."""
        with self._job.started():
            try:
                self._run_until(n_updates)
                yield self
            finally:
                self._signal(signal.SIGCONT)

    def lap(self, n_updates: int) -> tuple[float, list[Line]]:
        """Run n more updates: the seconds since the update before, and their journal lines."""
        n_before = len(self.updates)
        self._signal(signal.SIGCONT)
        self._run_until(n_before + n_updates)
        return self.since(n_before)

    def since(self, n_before: int) -> tuple[float, list[Line]]:
        """Seconds from the update before to the last one, and the journal lines between."""
        found = self.updates[n_before:]
        return found[-1]["clock_s"] - self.updates[n_before - 1]["clock_s"], found

    def _run_until(self, n_updates: int) -> None:
        """Run on, then pause with the newest version published."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.updates) < n_updates or self._published < self.updates[-1]["version"]:
            process = self._job.process
            code = process.poll() if process is not None else None
            if code is not None or time.monotonic() > deadline:
                why = f"ended with {code}" if code is not None else f"made none within {PATIENCE_S:g} s"
                raise ConfigError(f"a job goes on making versions to be measured: {self._job.run} {why}")
            time.sleep(LOOK_S)
            n_before = len(self.updates)
            self._read()
            if len(self.updates) > n_before:
                deadline = time.monotonic() + PATIENCE_S
        self._signal(signal.SIGSTOP)

    def _signal(self, number: signal.Signals) -> None:
        """Send a signal to every process below mpirun, but not to mpirun."""
        now = time.monotonic()
        if number is signal.SIGSTOP:
            self._stopped_at = now
        elif self._stopped_at is not None:
            self._stops.append([self._stopped_at, now])
            self._stopped_at = None
        process = self._job.process
        for pid in descendants(process.pid) if process is not None else []:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue

    def _clock(self, t: float) -> float:
        """The time of its own clock, in seconds."""
        return t - sum(went_on - stopped for stopped, went_on in self._stops if stopped < t)

    def _read(self) -> None:
        """New journal lines of the head."""
        if not exists(self._path, 0):
            return
        for raw in self._place.lines(self._path):
            if b'"event":"update"' in raw:
                line = json.loads(raw)
                self.updates.append(line | {"clock_s": self._clock(line["t"])})
            elif b'"event":"publish"' in raw:
                self._published = json.loads(raw)["version"]


@contextmanager
def lanes(jobs: dict[str, KilledJob], n_updates: dict[str, int]) -> Iterator[dict[str, Lane]]:
    """Every job in its steady state, all of them paused."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(Lane(job).started(n_updates[name])) for name, job in jobs.items()}


def descendants(pid: int) -> list[int]:
    """Descendants of this process, also those in sessions of their own."""
    parents: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8")
            except (FileNotFoundError, ProcessLookupError):
                continue
            parents.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, left = [], [pid]
    while left:
        below = parents.get(left.pop(), [])
        found += below
        left += below
    return found
