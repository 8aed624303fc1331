"""Records a learner or generator with torch.profiler to RUN/profiles: steps of [profile], or by SIGUSR2."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from loguru import logger
from torch.profiler import ProfilerActivity, profile

from actors.runtime import process
from areal_bus.config.sections import ProfileConfig
from areal_bus.core.events import Event
from areal_bus.storage.journal import Journal

SECONDS = 10.0  # of a recording on demand, and the longest of a generator: a viewer opens some 100 MB
QUIET = "6"  # of Kineto's levels, above the lines that it prints for each start and stop


@dataclass(slots=True)
class _Recording:
    """A recording under way."""

    profiler: profile
    first: int  # step
    began: float  # monotonic
    last: int | None  # step; None: not limited
    ends: float | None  # monotonic; None: not limited

    def is_over(self, step: int) -> bool:
        return (self.last is not None and step > self.last) or (self.ends is not None and time.monotonic() >= self.ends)


class TorchProfiler:
    """Call `turn` on the main thread between two turns of the loop, and `close` after the last one."""

    def __init__(self, name: str, folder: Path, settings: ProfileConfig, journal: Journal, *, bounds_s: bool) -> None:
        """`folder`: of the run. `bounds_s`: a recording of steps also ends after SECONDS."""
        self._name, self._folder, self._journal = name, folder, journal
        self._bounds_s = bounds_s
        is_meant = settings.actor in (name, name.rpartition(".")[0])
        self._steps = settings.steps if is_meant else None  # to record; None when done
        self._recording: _Recording | None = None

    def turn(self, step: int) -> None:
        """`step` comes next."""
        if self._recording is not None:
            if self._recording.is_over(step):
                self._write(self._recording, step - 1)
        elif process.take_profile_request():
            self._begin(step, last=None, seconds=SECONDS)
        elif self._steps is not None and step >= self._steps[0]:
            (_, last), self._steps = self._steps, None
            if step <= last:
                self._begin(step, last=last, seconds=SECONDS if self._bounds_s else None)

    def close(self, step: int) -> None:
        """Write a recording under way; `step` would come next."""
        if self._recording is not None:
            self._write(self._recording, step - 1)

    def _begin(self, step: int, *, last: int | None, seconds: float | None) -> None:
        os.environ.setdefault("KINETO_LOG_LEVEL", QUIET)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profiler, now = profile(activities=activities), time.monotonic()
        try:
            profiler.start()
        except RuntimeError as error:  # another profiler runs in this process
            self._report(f"no recording: {error}")
            return
        self._recording = _Recording(profiler, step, now, last, None if seconds is None else now + seconds)

    def _write(self, recording: _Recording, last: int) -> None:
        """Write the trace. The job goes on if it cannot be written."""
        self._recording, seconds = None, time.monotonic() - recording.began
        file = self._file(recording.first)
        with self._journal.span("profile"):
            try:
                recording.profiler.stop()
                file.parent.mkdir(exist_ok=True)
                partial = file.with_name(f".{file.name}")
                recording.profiler.export_chrome_trace(str(partial))
                os.replace(partial, file)
            except (RuntimeError, OSError) as error:
                self._report(f"a recording is lost: {error}")
                return
        last = max(last, recording.first)
        self._journal.write(
            Event.PROFILE,
            file=str(file.relative_to(self._folder)),
            first=recording.first,
            last=last,
            seconds=round(seconds, 3),
        )
        logger.info("{}: recorded {:.1f} s in {}", self._name, seconds, file)

    def _file(self, step: int) -> Path:
        """A name that is free: the same step may be recorded again."""
        folder, stem = self._folder / "profiles", f"{self._name}-step-{step:06d}"
        n = 0
        while (file := folder / f"{stem}{f'-{n}' if n else ''}.json.gz").exists():
            n += 1
        return file

    def _report(self, text: str) -> None:
        logger.warning("{}: {}", self._name, text)
        self._journal.write(Event.NOTE, text=text)
