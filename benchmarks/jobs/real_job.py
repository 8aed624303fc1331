"""Runs a real job under mpirun and kills its actors one after the other at seeded moments.

A generator or reward is killed only while another one is healthy, since the bench measures how fast that one takes
over. Member states and process ids are read from the growing journal.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from benchmarks.jobs import demo
from tools.follow import Place
from tools.run import Line, Run

LOOK_S = 0.02
PATIENCE_S = 120.0  # a loaded machine starts a generator within this
AFTERWARDS_S = (0.2, 1.5)  # delay from the moment a kill is allowed to the kill


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL to an actor."""

    role: Role
    name: str  # generator-0.1
    t: float  # monotonic seconds, as in the journal


class JournalTail:
    """Follows the journals of a run's heads and keeps the state of the ring."""

    def __init__(self, run: Path) -> None:
        self._run = Run(run)
        self._places: dict[Path, Place] = {}
        self.states: dict[str, str] = {}  # newest state of each member of the present head
        self.version = 0
        self.n_updates = 0  # over all terms

    def look(self) -> None:
        """Read new lines."""
        for path in self._run.journals("head"):
            for raw in self._places.setdefault(path, Place()).lines(path):
                self._take(json.loads(raw))

    def _take(self, line: Line) -> None:
        match line["event"]:
            case "start":
                self.states.clear()
            case "joined":
                place = line["name"].rpartition(".")[0]
                self.states = {name: x for name, x in self.states.items() if name.rpartition(".")[0] != place}
                self.states[line["name"]] = "joining"
            case "member":
                self.states[line["name"]] = line["state"]
            case "update":
                self.version = line["version"]
                self.n_updates += 1
            case "term":
                self.version = line["version"]

    def healthy(self, role: Role) -> list[str]:
        return sorted(name for name, x in self.states.items() if name.startswith(f"{role}-") and x == "healthy")


class KilledJob:
    """One run, over its starts."""

    def __init__(self, run: Path, *, config: str, changes: tuple[str, ...], ranks: int, quiet: bool) -> None:
        self.run, self._quiet = run, quiet
        settings = (*changes, f'run.name="{run.name}"', f'run.folder="{run.parent}"')
        overrides = [word for setting in settings for word in ("--set", setting)]
        self._line = [demo.mpirun(), "--oversubscribe", "-np", str(ranks), sys.executable, "-m", "areal_bus.launch"]
        self._line += [config, *overrides]
        self.tail = JournalTail(run)
        self.process: subprocess.Popen[bytes] | None = None

    @contextmanager
    def started(self, *arguments: str) -> "Iterator[KilledJob]":
        """The running job; it is ended in any case."""
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
        out = sys.stderr if self._quiet else None
        self.process = subprocess.Popen([*self._line, *arguments], cwd=demo.ROOT, env=os.environ | allowed, stdout=out)
        try:
            yield self
        finally:
            if self.process.poll() is None:
                self.process.terminate()
                try:
                    self.process.wait(demo.TAIL_S)
                except subprocess.TimeoutExpired:
                    self.process.kill()
                    self.process.wait()

    def finish(self) -> None:
        """Wait for the end. Raises ConfigError unless the job ends by itself with code 0."""
        code = self.process.wait(PATIENCE_S) if self.process is not None else None
        if code != 0:
            raise ConfigError(f"the job must end with code 0 to be measured: it ended with {code} ({self.run})")

    def ended(self, patience_s: float) -> None:
        """Raises ConfigError unless it ends with success within this time."""
        try:
            if self.process is not None:
                self.process.wait(patience_s)
        except subprocess.TimeoutExpired:
            raise ConfigError(f"the job must end within {patience_s:g} s: {self.run} has not") from None
        self.finish()

    def drain(self) -> None:
        if self.process is not None:
            self.process.send_signal(signal.SIGUSR1)
        self.finish()

    def wait_until(self, is_so: Callable[[], Any], what: str) -> None:
        """Wait for a condition. Raises ConfigError at the deadline, or if the job ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self.tail.look()
            if is_so():
                return
            code = self.process.poll() if self.process is not None else None
            if code is not None or time.monotonic() > deadline:
                why = f"the job ended with {code}" if code is not None else f"not within {PATIENCE_S:g} s"
                raise ConfigError(f"{what}: {why} ({self.run})")
            time.sleep(LOOK_S)

    def pid(self, place: str) -> tuple[str, int]:
        """Name and process id of the newest life at this place ("generator-0")."""
        paths = Run(self.run).journals(place.rpartition("-")[0])
        path = [path for path in paths if path.name.startswith(f"{place}.")][-1]
        pid = int(json.loads(next(Place().lines(path)))["pid"])
        if b"actors.runtime.start" not in Path(f"/proc/{pid}/cmdline").read_bytes():
            raise ConfigError(f"{path.stem} must be an actor's process to be killed: {pid} is none")
        return path.stem, pid


class Killer:
    """Kills actors of a role. The seed chooses the victim and the moment."""

    def __init__(self, job: KilledJob, seed: int) -> None:
        self._job, self._dice = job, random.Random(seed)
        self.kills: list[Kill] = []

    def _healthy(self, role: Role) -> list[str]:
        """Healthy members by the journal, without victims whose death is not journalled yet."""
        dead = {kill.name for kill in self.kills}
        return [name for name in self._job.tail.healthy(role) if name not in dead]

    def kill(self, role: Role, wait_s: tuple[float, float] = AFTERWARDS_S) -> Kill:
        """Kill one actor of this role, a random time after another one can take over."""
        tail = self._job.tail
        single = role in (Role.HEAD, Role.LEARNER)
        n_updates = tail.n_updates
        self._job.wait_until(
            lambda: tail.n_updates > n_updates and (single or len(self._healthy(role)) > 1), f"a {role} may be killed"
        )
        time.sleep(self._dice.uniform(*wait_s))  # random moment of the kill, not a wait for an event
        self._job.wait_until(lambda: single or len(self._healthy(role)) > 1, f"a {role} may be killed")
        place = f"{role}-0" if single else self._dice.choice(self._healthy(role)).rpartition(".")[0]
        name, pid = self._job.pid(place)
        kill = Kill(role, name, time.monotonic())
        os.kill(pid, signal.SIGKILL)
        self.kills.append(kill)
        return kill
