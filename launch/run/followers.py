"""Processes beside a job that read its journal: trackers (`tools.export`) and alarms (`tools.alarms`).

They belong to the rank of the head, and no actor waits for them. The end of their standard input ends them, however the
rank ended. The death of one is reported and changes nothing else.
"""

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from areal_bus.process.commands import as_here
from areal_bus.process.isolation import CHILD
from launch.plan.environment import actor_environment

ENDS_S = 10.0  # at the end of the job, for the last rows and an upload; whoever takes longer goes on alone
ALARMS = "alarms"


@dataclass(slots=True)
class Followers:
    """The processes beside one job."""

    run: Path = Path("/nowhere")
    command: Sequence[str] = (*CHILD, "tools.export")  # of a tracker
    _processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def start(self, run: Path, trackers: Sequence[str], *, alarms: bool = False) -> None:
        """Start a process for each tracker, and one that prints alarms. One that cannot start is reported."""
        self.run = run
        for name in trackers:
            self._start(name, [*self.command, str(run), "--to", name, "--until-eof"])
        if alarms:
            self._start(ALARMS, [*CHILD, "tools.alarms", str(run), "--until-eof"])

    def _start(self, name: str, command: Sequence[str]) -> None:
        """In its own session. Alarms are printed where this rank prints; the rest is logged."""
        try:
            self.log(name).parent.mkdir(exist_ok=True)
            with self.log(name).open("ab") as log:
                self._processes[name] = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=None if name == ALARMS else log,
                    stderr=log,
                    env=actor_environment(os.environ, gpus=(), cpu=True),
                    start_new_session=True,
                )
        except OSError as error:
            self._report(name, f"did not start: {error}")

    def check(self) -> None:
        """Report those that have died since the last call."""
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                self._forget(name)
                self._report(name, f"ended with exit code {process.returncode} ({self.log(name)})")

    def end(self) -> None:
        """Let them write the last lines of the journal. Call this after the last actor has ended."""
        self.check()
        ending = dict(self._processes)
        for name in ending:
            self._forget(name)
        deadline = time.monotonic() + ENDS_S
        for name, process in ending.items():
            try:
                code = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                title = self._title(name)
                print(f"{title}: still writes after {ENDS_S:g} s and goes on alone", file=sys.stderr, flush=True)
                continue
            if code:
                self._report(name, f"ended with exit code {code} ({self.log(name)})")

    def _forget(self, name: str) -> None:
        """Close its standard input, which ends it."""
        stdin = self._processes.pop(name).stdin
        if stdin is not None:
            stdin.close()

    def log(self, name: str) -> Path:
        """The file that gets its output."""
        return self.run / "logs" / ("alarms.txt" if name == ALARMS else f"tracker-{name.replace(':', '-')}.txt")

    @staticmethod
    def _title(name: str) -> str:
        return name if name == ALARMS else f"tracker {name}"

    def _report(self, name: str, what: str) -> None:
        again = f"python -m tools.alarms {shlex.quote(str(self.run))} prints them"
        if name != ALARMS:
            again = f"python -m tools.export {shlex.quote(str(self.run))} --to {name} writes it later"
        print(f"{self._title(name)}: {what}; the job goes on, and {as_here(again)}", file=sys.stderr, flush=True)
