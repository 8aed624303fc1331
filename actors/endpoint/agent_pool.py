"""Processes that run agents, each under a deadline of its own time; knows no HTTP and no tokens.

A thread for each process: it takes the next conversation, hands it over and waits for what comes first: what the agent
returns, the end of its time, the end of its process, or nobody wanting it any more. All but the first cost the process,
with all that it started.
"""

import json
import os
import queue
import selectors
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.endpoint.sessions import AgentEnded, Session
from actors.rewards.ipc import REQUEST_BYTES, pack
from actors.rewards.pool import WorkerLost, WorkerProcess
from areal_bus.errors import ConfigError

MODULE = "actors.endpoint.agent_worker"
STARTS = 3  # processes that may end while they load it
START_S = 60.0  # for a process to load the agent's code, its imports included
BELL, CHILD = "bell", "child"  # what a selector's event is of
CLOSE_S = 10.0  # a thread has ended by then: its process is killed


@dataclass(frozen=True, slots=True)
class AgentJob:
    """One conversation to run."""

    session: Session
    row: Mapping[str, Any]
    base_url: str


class AgentLost(Exception):
    """The process did not do what it was to do; the text says why. It is of no use any more."""


class AgentUnusable(AgentLost):
    """The agent's code does not load."""


class AgentPool:
    """At most `n_workers` processes, made when they are needed."""

    def __init__(self, function: str, *, n_workers: int, timeout_s: float, prints: Path | None = None) -> None:
        """`prints` is the file that takes what agents print."""
        self.function, self.timeout_s, self.prints = function, timeout_s, prints
        self.jobs: queue.SimpleQueue[AgentJob | None] = queue.SimpleQueue()
        self.has_loaded = False  # the agent's code did, once
        self._n_workers, self._n_jobs = n_workers, 0
        self._runners: list[AgentRunner] = []

    def run(self, job: AgentJob) -> None:
        """Begin a conversation, as soon as a process is free; its session hears the end of it."""
        self._n_jobs += 1
        self.jobs.put(job)
        n_unfinished = self._n_jobs - sum(runner.n_done for runner in self._runners)
        if len(self._runners) < min(n_unfinished, self._n_workers):
            self._runners.append(AgentRunner(self))

    def close(self) -> None:
        """End all of them. Every session is closed by now."""
        for _ in self._runners:
            self.jobs.put(None)
        for runner in self._runners:
            runner.thread.join(CLOSE_S)
        self._runners.clear()


class AgentRunner:
    """One thread and its process."""

    def __init__(self, agents: AgentPool) -> None:
        self.n_done = 0  # conversations
        self._agents = agents
        self._child: WorkerProcess | None = None
        self._selector = selectors.DefaultSelector()
        self.thread = threading.Thread(target=self._serve, name="agent", daemon=True)
        self.thread.start()

    def _serve(self) -> None:
        """The thread: its process dies with it."""
        bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # rung when nobody wants the conversation any more
        with self._selector:
            self._selector.register(bell, selectors.EVENT_READ, BELL)
            while (job := self._agents.jobs.get()) is not None:
                if job.session.begin(lambda: os.eventfd_write(bell, 1)):
                    self._run(job)
                self.n_done += 1
            self._drop()
        os.close(bell)

    def _run(self, job: AgentJob) -> None:
        session, timeout_s = job.session, self._agents.timeout_s
        try:
            child = self._start(session)
            request = {"id": session.number, "row": job.row, "base_url": job.base_url, "api_key": session.key}
            child.send(pack(request, cap_bytes=REQUEST_BYTES))
            record = receive(self._selector, child, lambda: timeout_s - session.own_s, lambda: session.is_closed)
            if record is None:
                raise AgentLost(f"it took more than workflow.agent.timeout_s = {timeout_s:g} s of its own")
            if record.get("id") != session.number:
                raise AgentLost("its process wrote what is no answer")
            session.end(read_end(record))
        except (AgentLost, WorkerLost, ValueError, OSError) as error:  # OSError: the system has no process for it
            self._drop()
            is_unusable = isinstance(error, AgentUnusable) and not self._agents.has_loaded
            session.end(AgentEnded(None, str(error), is_unusable=is_unusable))

    def _start(self, session: Session) -> WorkerProcess:
        """The process, with the agent's code loaded. Raises Lost."""
        if self._child is None or self._child.ended:
            self._drop()
            self._child = load(self._selector, self._agents.function, lambda: session.is_closed, self._agents.prints)
            self._agents.has_loaded = True
            session.restart_clock()
        return self._child

    def _drop(self) -> None:
        """Kill the process with all that it started."""
        if self._child is not None:
            end(self._child)
            self._child = None


def load(
    selector: selectors.BaseSelector, function: str, is_unwanted: Callable[[], bool], prints: Path | None = None
) -> WorkerProcess:
    """A process with the agent's code. Raises Unusable when it does not load, Lost when it is wanted no more."""
    for _ in range(STARTS):
        try:
            return load_once(selector, function, is_unwanted, prints)
        except WorkerLost as lost:  # perhaps killed by somebody: that says nothing of the code
            why = str(lost)
    raise AgentUnusable(f"workflow.agent.function {function!r} must load: {why}")


def load_once(
    selector: selectors.BaseSelector, function: str, is_unwanted: Callable[[], bool], prints: Path | None
) -> WorkerProcess:
    began = time.monotonic()
    child = WorkerProcess(selector, CHILD, MODULE)
    try:
        order = {"function": function, "path": sys.path, "prints": None if prints is None else str(prints)}
        child.send(pack(order, cap_bytes=REQUEST_BYTES))
        record = receive(selector, child, lambda: began + START_S - time.monotonic(), is_unwanted)
        if record is None:
            raise AgentUnusable(f"workflow.agent.function {function!r} must load within {START_S:g} s: it did not")
        if record != {"ready": True}:
            raise AgentUnusable(str(record.get("broken", "its process wrote what is no answer")))
    except (AgentLost, WorkerLost):
        end(child)
        raise
    return child


def receive(
    selector: selectors.BaseSelector,
    child: WorkerProcess,
    remaining_s: Callable[[], float],
    is_unwanted: Callable[[], bool],
) -> dict[str, Any] | None:
    """The next frame; None when no time remains. Raises WorkerLost; Lost when nobody wants it any more."""
    while (left_s := remaining_s()) > 0:
        if is_unwanted():
            raise AgentLost("nobody wants its conversation any more")
        for selected, events in selector.select(left_s):
            if selected.data == BELL:
                os.eventfd_read(selected.fd)
            elif events & selectors.EVENT_WRITE:
                child.flush()
            elif records := child.receive():
                return records[0]
    return None


def read_end(record: dict[str, Any]) -> AgentEnded:
    """Raises ValueError for what cannot go on in a trajectory."""
    returned = record.get("returned")
    if returned is not None and not isinstance(returned, dict):
        raise ValueError("its process wrote what is no answer")
    json.dumps(returned, allow_nan=False, ensure_ascii=False).encode()
    error, place, trace = (str(record.get(name, "")) for name in ("error", "place", "trace"))
    return AgentEnded(returned, error, place, trace)


def end(child: WorkerProcess) -> None:
    child.kill()
    child.reap()


def check_agent(function: str) -> None:
    """Raises ConfigError when the agent's code does not load."""
    with selectors.DefaultSelector() as selector:
        try:
            end(load(selector, function, lambda: False))
        except AgentLost as lost:
            raise ConfigError(str(lost)) from None
