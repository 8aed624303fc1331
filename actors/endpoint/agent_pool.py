"""A pool of worker processes that run agents, each conversation with a deadline.

Each process has a thread, which kills it with all that it started unless the agent's return value comes first.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.endpoint.sessions import AgentEnded, Session
from actors.environments.environment_code import EnvironmentCode
from actors.processes.worker_process import CalledProcess, WorkerLost
from actors.rewards.loading import reward_options
from actors.runtime.user_code import user_folder
from areal_bus.config.names.workflows import BUILT_IN
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

MODULE = "actors.endpoint.agent_worker"
MAX_STARTS = 3  # attempts to load the agent's code
START_S = 60.0  # longest time to load the agent's code, its imports included
ENVIRONMENT_START_S = 600.0  # the same for an environment, which also prepares its data
EXIT_S = 10.0  # longest time between the closing of a process's pipes and its end: much memory takes long to free
CLOSE_S = 10.0  # longest wait for a thread at close


@dataclass(frozen=True, slots=True)
class AgentCode:
    """What the processes load: the user's function, a built-in agent, or an environment."""

    function: str  # "module:function"; for the others workflow.function
    environment: EnvironmentCode | None = None
    built_in: Mapping[str, Any] | None = None  # the order of `actors.agents.load_builtin`

    @classmethod
    def of(cls, config: Config, run_folder: Path | None = None) -> "AgentCode":
        """That of workflow.function "agent", "multi_turn", "tools" or "verifiers:NAME".

        `run_folder`: where a judge keeps its replies and its budget; without one each process has its own.
        """
        function, arguments = config.workflow.function, dict(config.workflow.arguments)
        if name := config.workflow.environment:
            return cls(function, EnvironmentCode.of(config, name, user_folder()))
        if function in BUILT_IN:
            options = reward_options(config.reward, run_folder)
            order = {"name": function, "arguments": arguments, "reward": options, "folder": user_folder()}
            return cls(function, built_in=order)
        return cls(config.workflow.agent.function)

    @property
    def setting(self) -> str:
        """The setting that names it, with its value."""
        is_users = self.environment is None and self.built_in is None
        return f"workflow.{'agent.' if is_users else ''}function {self.function!r}"

    @property
    def start_s(self) -> float:
        """Longest time to load it."""
        return START_S if self.environment is None else ENVIRONMENT_START_S

    def order(self, prints: Path | None) -> dict[str, Any]:
        """The first frame of a process. `prints`: the file for its output."""
        return {
            "function": self.function,
            "environment": self.environment.order() if self.environment else None,
            "built_in": self.built_in,
            "path": sys.path,
            "folder": user_folder(),
            "prints": None if prints is None else str(prints),
        }


@dataclass(frozen=True, slots=True)
class AgentJob:
    """One conversation to run."""

    session: Session
    row: Mapping[str, Any]
    base_url: str


class AgentLost(Exception):
    """The conversation failed in its process; the text has the reason. The process is killed."""


class AgentUnusable(AgentLost):
    """The agent's code does not load."""


class AgentPool:
    """Runs conversations in at most `n_workers` processes, started on demand."""

    def __init__(self, code: AgentCode, *, n_workers: int, timeout_s: float, prints: Path | None = None) -> None:
        """`prints`: the file that receives the agents' output."""
        self.code, self.timeout_s, self.prints = code, timeout_s, prints
        self.jobs: queue.SimpleQueue[AgentJob | None] = queue.SimpleQueue()
        self.has_loaded = False  # the agent's code has loaded once
        self._n_workers, self._n_jobs = n_workers, 0
        self._runners: list[AgentRunner] = []

    def run(self, job: AgentJob) -> None:
        """Run a conversation once a process is free. Its session receives AgentEnded."""
        self._n_jobs += 1
        self.jobs.put(job)
        n_unfinished = self._n_jobs - sum(runner.n_done for runner in self._runners)
        if len(self._runners) < min(n_unfinished, self._n_workers):
            self._runners.append(AgentRunner(self))

    def close(self) -> None:
        """End all threads and processes. Every session must be closed by now."""
        for _ in self._runners:
            self.jobs.put(None)
        for runner in self._runners:
            runner.thread.join(CLOSE_S)
        self._runners.clear()


class AgentRunner:
    """One thread and its worker process."""

    def __init__(self, agents: AgentPool) -> None:
        self.n_done = 0  # finished conversations
        self._agents = agents
        self._process: CalledProcess | None = None
        self.thread = threading.Thread(target=self._serve, name="agent", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        """Run jobs until the end of the queue. The process dies with this thread."""
        closed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # written when the session closes
        while (job := self._agents.jobs.get()) is not None:
            if job.session.begin(lambda: os.eventfd_write(closed, 1)):
                self._run(job, closed)
            self.n_done += 1
        self._drop()
        os.close(closed)

    def _run(self, job: AgentJob, closed: int) -> None:
        session, timeout_s = job.session, self._agents.timeout_s
        try:
            process = self._start(session, closed)
            process.send({"id": session.number, "row": job.row, "base_url": job.base_url, "api_key": session.key})
            record = process.receive(lambda: timeout_s - session.own_s, lambda: check_open(session))
            if record is None:
                raise AgentLost(f"it took more than workflow.agent.timeout_s = {timeout_s:g} s of its own")
            if record.get("id") != session.number:
                raise AgentLost("its process wrote an invalid reply")
            session.end(read_end(record))
        except (AgentLost, WorkerLost, ValueError, RecursionError, OSError) as error:  # OSError: of a process's start
            self._drop()
            is_unusable = isinstance(error, AgentUnusable) and not self._agents.has_loaded
            was_killed = isinstance(error, WorkerLost) and error.was_killed
            session.end(AgentEnded(None, str(error), is_unusable=is_unusable, was_killed=was_killed))

    def _start(self, session: Session, closed: int) -> CalledProcess:
        """The process with the agent's code loaded. Raises AgentLost."""
        if self._process is None or self._process.ended:
            self._drop()
            agents = self._agents
            self._process = load(agents.code, agents.prints, check=lambda: check_open(session), alarm=closed)
            self._agents.has_loaded = True
            session.restart_clock()
        return self._process

    def _drop(self) -> None:
        """Kill the process with everything it started."""
        if self._process is not None:
            self._process.kill()
            self._process = None


def check_open(session: Session) -> None:
    """Raises AgentLost when the session is closed."""
    if session.is_closed:
        raise AgentLost("its session is closed")


def load(code: AgentCode, prints: Path | None, *, check: Callable[[], None], alarm: int | None = None) -> CalledProcess:
    """Start a process with the agent's code. `check` may raise before each wait. Raises AgentUnusable."""
    for _ in range(MAX_STARTS):
        try:
            return load_once(code, prints, check, alarm)
        except WorkerLost as lost:  # it may have been killed from outside: retry
            why = str(lost)
    raise AgentUnusable(f"{code.setting} must load: {why}")


def load_once(code: AgentCode, prints: Path | None, check: Callable[[], None], alarm: int | None) -> CalledProcess:
    began = time.monotonic()
    process = CalledProcess(MODULE, exit_s=EXIT_S, alarm=alarm)
    try:
        process.send(code.order(prints))
        record = process.receive(lambda: began + code.start_s - time.monotonic(), check)
        if record is None:
            raise AgentUnusable(f"timed out: {code.setting} did not load within {code.start_s:g} s")
        if record != {"ready": True}:
            raise AgentUnusable(str(record.get("broken", "its process wrote an invalid reply")))
    except (AgentLost, WorkerLost):
        process.kill()
        raise
    return process


def read_end(record: dict[str, Any]) -> AgentEnded:
    """The AgentEnded of a reply. Raises ValueError for an invalid reply."""
    returned = record.get("returned")
    if returned is not None and not isinstance(returned, dict):
        raise ValueError("its process wrote an invalid reply")
    json.dumps(returned, allow_nan=False, ensure_ascii=False).encode()
    error, place, trace = (str(record.get(name, "")) for name in ("error", "place", "trace"))
    return AgentEnded(returned, error, place, trace)


def check_agent(code: AgentCode) -> None:
    """Raises ConfigError when the agent's code does not load."""
    try:
        load(code, None, check=lambda: None).kill()
    except AgentLost as lost:
        raise ConfigError(str(lost)) from None
