"""Agents outside the job: each opens an episode over HTTP, calls the model, and closes it; a deadline ends the rest.

All generators of a host listen on the port of RUN/agents.json, whose key opens episodes. An episode has a key and a
base URL of its own. It is one sample of one lease: whichever of close, deadline and cancellation comes first ends it.
"""

import asyncio
import hmac
import json
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from actors.endpoint.agent_pool import AgentJob
from actors.endpoint.openai_api import RequestRejected, read_object
from actors.endpoint.sessions import AgentEnded, Session
from actors.rewards.binding.values import MAX_REWARD
from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import write_atomic
from areal_bus.transport.web_server import HOST

ACCESS = "agents.json"
WAIT_S = 2.0  # an agent that opens an episode waits for it so long; its next connection may reach another generator
LOOK_S = 1.0  # interval of looks at an episode's deadline
QUIET_S = 60.0  # episodes that wait without an agent so long are reported
RESULT_BYTES = 64 << 10  # as of an agent in a worker process


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """Where agents open episodes, on each host of a run; of RUN/agents.json, mode 0600."""

    port: int
    key: str

    @property
    def base_url(self) -> str:
        return f"http://{HOST}:{self.port}/v1"

    @classmethod
    def of(cls, run_folder: Path) -> "AgentAccess":
        """That of a run which has begun. Raises ConfigError."""
        try:
            fields = json.loads((run_folder / ACCESS).read_text(encoding="utf-8"))
            return cls(int(fields["port"]), str(fields["key"]))
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"unreadable {run_folder / ACCESS}: the start of a run writes it, and all hosts read it ({error})"
            ) from None

    @classmethod
    def make(cls, run_folder: Path) -> "AgentAccess":
        """That of the run's earlier start, or a new one with a free port and an unguessable key."""
        if (run_folder / ACCESS).exists():
            return cls.of(run_folder)
        with socket.create_server((HOST, 0)) as free:
            access = cls(free.getsockname()[1], f"sk-{secrets.token_urlsafe(32)}")
        fields = {"base_url": access.base_url, "port": access.port, "key": access.key}
        write_atomic(run_folder / ACCESS, json.dumps(fields) + "\n", mode=0o600)
        return access


class ExternalAgents:
    """Episodes that wait for an agent, and those that have one. `run` and `close` are those of AgentPool.

    Everything else runs on the endpoint's event loop.
    """

    def __init__(self, access: AgentAccess, *, timeout_s: float, most: int) -> None:
        """`timeout_s`: of an agent's own time, the model's not counted. `most`: episodes that are open at once."""
        self.access = access
        self.soon: Callable[[Callable[[], object]], None] | None = None  # calls on the endpoint's loop, once it serves
        self._timeout_s = timeout_s
        self._jobs: asyncio.Queue[AgentJob] = asyncio.Queue()
        self._free = asyncio.Semaphore(most)
        self._n_opened = 0
        self._watches: set[asyncio.Task[None]] = set()

    def run(self, job: AgentJob) -> None:
        """Offer an episode. Its session receives AgentEnded."""
        if self.soon is None:
            raise RuntimeError("the endpoint must serve before episodes are offered")
        self.soon(lambda: self._offer(job))

    def close(self) -> None:
        """Every session is closed by now, and the endpoint's loop cancels what watches them."""

    def check_key(self, key: str) -> None:
        """Raises RequestRejected unless it is the run's."""
        if not hmac.compare_digest(key.encode(errors="replace"), self.access.key.encode()):
            raise RequestRejected(
                f"wrong API key: an episode is opened with the key of RUN/{ACCESS}", status=401, code="invalid_api_key"
            )

    async def open(self, is_gone: Callable[[], bool]) -> dict[str, Any]:
        """Wait for an episode: its row, base URL and key. Raises RequestRejected if none comes within WAIT_S."""
        try:
            async with asyncio.timeout(WAIT_S):
                job = await self._begun(is_gone)
        except TimeoutError:
            sentence = f"missing episode: none waited for an agent in {WAIT_S:g} s; ask again"
            raise RequestRejected(sentence, status=503, code="no_episode") from None
        session = job.session
        self._n_opened += 1
        self._start(self._watch(session))
        about = {"id": session.name, "base_url": job.base_url, "api_key": session.key, "timeout_s": self._timeout_s}
        return about | {"row": dict(job.row)}

    async def _begun(self, is_gone: Callable[[], bool]) -> AgentJob:
        """The next episode, which has begun. Its place is another's once it is closed."""
        await self._free.acquire()
        try:
            while True:
                job = await self._jobs.get()
                if is_gone():
                    self._jobs.put_nowait(job)  # for another agent
                    raise ConnectionError("the agent has disconnected")
                if job.session.begin(self._give_back):
                    return job
        except BaseException:
            self._free.release()
            raise

    def _give_back(self) -> None:
        """From any thread."""
        if self.soon is not None:
            self.soon(self._free.release)

    def _offer(self, job: AgentJob) -> None:
        if not self._watches:
            self._start(self._remind())
        self._jobs.put_nowait(job)

    def _start(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._watches.add(task)
        task.add_done_callback(self._watches.discard)

    async def _watch(self, session: Session) -> None:
        """End the episode at its deadline: another agent may begin it again."""
        while session.needs_connections:
            left_s = self._timeout_s - session.own_s
            if left_s <= 0:
                why = (
                    f"timed out: its agent did not close it within workflow.agent.timeout_s = {self._timeout_s:g} s of "
                    "its own"
                )
                session.end(AgentEnded(None, why, was_killed=True))
                return
            await asyncio.sleep(min(left_s, LOOK_S))

    async def _remind(self) -> None:
        """Report episodes that no agent opens."""
        while True:
            n_before = self._n_opened
            await asyncio.sleep(QUIET_S)
            if self._n_opened == n_before and not self._jobs.empty():
                logger.warning(
                    "no agent has opened an episode in {:g} s: {} wait at {}/episodes (docs/agents.md)",
                    QUIET_S,
                    self._jobs.qsize(),
                    self.access.base_url,
                )


def read_result(body: bytes) -> AgentEnded:
    """What an agent posts when it closes an episode: the fields that an agent returns, or an `error`.

    Raises RequestRejected, and the episode stays open.
    """
    if len(body) > RESULT_BYTES:
        raise RequestRejected(f"a result has at most {RESULT_BYTES} bytes: this one has {len(body)}", status=413)
    fields = {name: value for name, value in read_object(body or b"{}").items() if value is not None}  # as in a call
    if "error" in fields:
        return AgentEnded(None, str(fields["error"]) or "its agent reported an error")
    reward = fields.get("reward", 0.0)
    if isinstance(reward, bool) or not isinstance(reward, int | float) or abs(reward) > MAX_REWARD:
        raise RequestRejected(
            f"a reward must be a number of at most {MAX_REWARD:g}: leave it out if the run's own function scores"
        )
    return AgentEnded(fields)
