"""The worker process of an agent or environment: `python -m actors.endpoint.agent_worker PARENT_PID`.

Its first frame names the agent's function, a built-in agent or the environment; it replies {"ready": true} or
{"broken": reason}. Then each frame is one conversation and each reply the agent's return value. The pool's thread
enforces deadlines by killing the process. An agent gets base URL and API key as arguments and in the environment
variables of OpenAI's client. For an environment or a built-in agent those variables stay the user's: its judges and
tools, MCP servers among them, would call the model that is trained.
"""

import asyncio
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from actors.agents import load_builtin
from actors.environments.environment_code import EnvironmentCode
from actors.environments.loading import load
from actors.processes.ipc import Channel, keep_prints, limit_damage, limit_prints_always
from actors.rewards.binding.values import plain
from actors.rewards.protocol import Score
from actors.rewards.worker import explain
from actors.runtime.user_code import add_user_folder, load_function
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import text_of

Agent = Callable[[Mapping[str, Any], str, str], Any]  # (row, base_url, api_key)


def main(parent: int) -> None:
    channel = Channel(parent)
    limit_damage()
    order = channel.read()
    if order is None:
        return
    sys.path[:] = order["path"]
    if order["folder"]:
        add_user_folder(order["folder"])
    keep_prints(order.get("prints"))
    for name in ("no_proxy", "NO_PROXY"):  # a proxy of the environment cannot reach loopback
        os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), "127.0.0.1"]))
    try:
        agent = load_code(order)
    except ConfigError as error:
        channel.reply({"broken": text_of(error)})
        return
    limit_prints_always()
    channel.reply({"ready": True})
    for request in channel:
        if not order["environment"] and not order["built_in"]:
            os.environ |= {"OPENAI_BASE_URL": request["base_url"], "OPENAI_API_KEY": request["api_key"]}
        answer = run(agent, request["row"], request["base_url"], request["api_key"])
        try:
            channel.reply({"id": request["id"], **answer})
        except ValueError as error:  # over the limit: nothing was written
            channel.reply({"id": request["id"], "error": f"an agent's return value is too long: {error}"})


def load_code(order: Mapping[str, Any]) -> Agent:
    """What the first frame names. Raises ConfigError."""
    if order["environment"]:
        return load(EnvironmentCode.read(order["environment"]))
    return load_builtin(order["built_in"]) if order["built_in"] else load_agent(order["function"])


def load_agent(function: str) -> Agent:
    """Import the agent's function. Raises ConfigError."""
    agent: Agent = load_function("workflow.agent.function", function)
    try:
        inspect.signature(agent).bind({}, "", "")
    except TypeError:
        raise ConfigError(
            f"wrong parameters of workflow.agent.function {function!r}: it must take (row, base_url, api_key)"
        ) from None
    return agent


def run(agent: Agent, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Run the agent. Returns its return value or its error."""
    try:
        value = agent(row, base_url, api_key)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"returned": read_returned(value)}
    except BaseException as error:  # noqa: BLE001  any exception of the agent, SystemExit too, ends its conversation
        return explain(error, agent, row)


def read_returned(value: object) -> dict[str, Any]:
    """The return value as fields for the reward; a number or Score is "reward". Raises TypeError, ValueError."""
    if value is None:
        return {}
    value = plain(value)
    if isinstance(value, Score):
        own = {"parts": dict(value.parts), "role_rewards": dict(value.role_rewards)}
        value = {"reward": plain(value.reward), "correct": plain(value.correct), **own}
    elif isinstance(value, bool):
        value = {"reward": float(value), "correct": value}
    elif isinstance(value, Real):
        value = {"reward": float(value)}
    if not isinstance(value, dict):
        raise TypeError(f"an agent returned a {type(value).__name__}: it must return a number, a Score, a dict or None")
    reward = value.get("reward")
    if isinstance(reward, float) and not math.isfinite(reward):
        raise ValueError(f"a reward must be finite: it is {reward}")
    value = {name: plain(one) for name, one in value.items()}
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()  # UnicodeEncodeError, a ValueError, for a lone surrogate
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
