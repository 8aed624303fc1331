"""One run over its starts: under mpirun, drained, resumed after the end of a rank."""

import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from areal_bus.errors import ConfigError
from areal_lab.chaos.victims import children
from areal_lab.sweep.runner import GRACE_S, last_line, named
from areal_lab.sweep.starting import as_options, log_of, ring_command, start_process


class ChaosJob:
    """A job of `ranks` ranks with the folder `run`. Its output goes to RUN.log."""

    def __init__(self, config: Path, settings: Sequence[str], *, ranks: int, run: Path) -> None:
        names = (f"run.folder={run.parent}", f"run.name={run.name}")
        self._words = [str(config), *as_options([*settings, *names])]
        self._ranks, self.run = ranks, run
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Raises ConfigError without mpirun."""
        self._spawn(self._words)

    def resume(self, *settings: str) -> None:
        """Go on where the run is, after its end."""
        self._spawn(["--resume", str(self.run), *as_options(settings)])

    @property
    def is_up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def failure(self) -> str:
        """How a job that has ended failed; "" after success."""
        code = self._process.returncode if self._process is not None else None
        return f"the job failed, {named(code)}: {last_line(log_of(self.run))}" if code else ""

    def supervisors(self) -> list[int]:
        """The processes of the ranks."""
        return children(self._process.pid) if self._process is not None and self.is_up else []

    def drain(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGUSR1)

    def end(self) -> None:
        """End it, if it runs."""
        if self._process is None or not self.is_up:
            return
        self._process.terminate()
        try:
            self._process.wait(GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _spawn(self, words: Sequence[str]) -> None:
        if self.is_up:
            raise ConfigError(f"duplicate start: the job of {self.run} runs")
        self.run.parent.mkdir(parents=True, exist_ok=True)
        with log_of(self.run).open("ab") as log:
            self._process = start_process(ring_command(words, ranks=self._ranks), log)
