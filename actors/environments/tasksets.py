"""A taskset of verifiers.v1 in this process: its tasks, and one episode at a time, with this Python (not uv's)."""

import asyncio
import hashlib
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import verifiers.v1 as vf
from verifiers.v1.harnesses.null import harness
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

from actors.environments.environment_code import INPUT, EnvironmentCode, Row, row_of
from areal_bus.errors import ConfigError
from areal_bus.messages import MAX_PARTS

KEY = "AREALBUS_CONVERSATION_KEY"  # environment variable that the package's client reads
PROGRAM_SOURCE: str = getattr(harness, "CHAT_PROGRAM_SOURCE", "") or harness.PROGRAM_SOURCE  # verifiers 0.4, 0.3
DEFAULT, CHAT = "bash", "null"  # the package's default program, which needs uv and a shell; its chat loop


class HostedTaskset:
    """Called as an agent is: with a row, the URL of the endpoint and the key of the conversation."""

    def __init__(self, code: EnvironmentCode) -> None:
        """Raises ConfigError for one that cannot be run here, and what the taskset raises."""
        self._code = code
        arguments = json.loads(code.arguments)
        is_default = vf.default_harness_id(code.name) == DEFAULT
        agent = {"runtime": {"type": "subprocess"}, **({"harness": {"id": CHAT}} if is_default else {})}
        self._environment = vf.load_environment(
            vf.resolve_env_config({"taskset": {"id": code.name, **arguments}, "agent": agent})
        )
        if not isinstance(self._environment, vf.SingleAgentEnv):
            raise ConfigError(f"{code.name!r} plays several agents: tasksets of one agent are supported")
        self._task = type(self._environment.taskset).task_type()
        self._loop = asyncio.Runner()
        use_this_python()

    def problems(self) -> tuple[list[Row], list[Row] | None]:
        """(training rows, None: a taskset has no evaluation set). An infinite one gives data.size tasks."""
        taskset = self._environment.taskset
        tasks: Iterable[Any] = taskset
        if taskset.INFINITE:
            tasks = (task for task, _ in zip(taskset, range(self._code.size), strict=False))
        return [self._row(task.data.model_dump(mode="json"), number) for number, task in enumerate(tasks)], None

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        """Run one episode. Returns the fields for the reward function "agent". Raises RuntimeError when it fails."""
        os.environ[KEY] = api_key
        return self._loop.run(self._play(row[INPUT], base_url))

    def score_group(self, given: Mapping[str, Any], completions: Sequence[str]) -> list[float]:
        raise NotImplementedError("a taskset has no group rubrics: loading.load refuses reward.group")

    async def _play(self, given: Mapping[str, Any], base_url: str) -> dict[str, Any]:
        task = self._task(self._task.data_type().model_validate(given), self._environment.config.taskset.task)
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=KEY)
        context = vf.ModelContext(client=client, model=self._code.model, sampling=vf.SamplingConfig())
        async with self._environment.serving():  # for each episode: it keeps a client for each key
            episode = await self._environment.run_episode(task, context)
        if len(episode.traces) != 1:
            told = "; ".join(f"{error.type}: {error.message}" for error in episode.errors)
            raise RuntimeError(f"the episode failed: {told or 'it has no trace'}")
        return returned(episode.traces[0], [*episode.errors, *episode.traces[0].errors])

    def _row(self, given: dict[str, Any], number: int) -> Row:
        return row_of(given, given.get("prompt"), f"task {number}")


def returned(trace: Any, errors: list[Any]) -> dict[str, Any]:
    """The fields of an episode. Raises RuntimeError when it failed before its rewards."""
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    ended = {"stop_condition": str(trace.stop_condition), "is_truncated": bool(trace.is_truncated)}
    if errors:
        told = "; ".join(f"{error.type}: {error.message}" for error in errors)
        if unscored and " scoring: " in told:
            return {"reward_error": told, **ended}
        raise RuntimeError(f"the episode failed: {told}")
    if not math.isfinite(trace.reward):
        return {"reward_error": f"the reward must be a finite number: it is {trace.reward}", **ended}
    scores = {name: reward.score for name, reward in trace.rewards.items() if reward is not None}
    parts = {**scores, **{name: value for name, value in trace.metrics.items() if value is not None}}
    return {"reward": float(trace.reward), "parts": dict(list(parts.items())[:MAX_PARTS]), **ended}


def use_this_python() -> None:
    """Let the package run its chat loop with this interpreter; its other scripts are prepared by uv, as they are."""
    original = SubprocessRuntime.prepare_uv_script

    async def prepare(runtime: Any, script: str | bytes, *arguments: Any, **named: Any) -> list[str]:
        if script != PROGRAM_SOURCE:
            prepared: list[str] = await original(runtime, script, *arguments, **named)
            return prepared
        data = PROGRAM_SOURCE.encode()
        path = f"{runtime.scripts_dir}/{hashlib.sha256(data).hexdigest()}.py"
        await runtime.write(path, data)
        return [sys.executable, path]

    SubprocessRuntime.prepare_uv_script = prepare
