"""One process that an agent runs in, `python -m actors.endpoint.agent_worker PARENT_PID`.

Its first frame names the agent's function; it answers {"ready": true} or {"broken": why}. Then each frame is one
conversation, and each answer what the agent returned. Nothing here keeps time: its thread kills it when it takes too
long. The agent finds its way to the model in its arguments, and in the environment as OpenAI's own client does.
"""

import asyncio
import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from actors.rewards.protocol import Score
from actors.rewards.worker import (
    ERROR_CHARACTERS,
    die_with,
    explain,
    keep_prints,
    limit_damage,
    limit_prints,
    read_frame,
    reply,
    take_channel,
)
from actors.runtime.user_code import cause
from areal_bus.errors import ConfigError

Agent = Callable[[Mapping[str, Any], str, str], Any]  # (row, base_url, api_key)


def main(parent: int) -> None:
    die_with(parent)
    limit_damage()
    requests, replies = take_channel()
    order = read_frame(requests)
    if order is None:
        return
    sys.path[:] = order["path"]
    keep_prints(order.get("prints"))
    go_directly()
    try:
        agent = load_agent(order["function"])
    except ConfigError as error:
        reply(replies, {"broken": str(error)[:ERROR_CHARACTERS]})
        return
    reply(replies, {"ready": True})
    myself = os.getpid()
    while (request := read_frame(requests)) is not None:
        limit_prints()
        answer = run(agent, request["row"], request["base_url"], request["api_key"])
        if os.getpid() != myself:
            os._exit(1)  # the agent forked: its child has no say
        try:
            reply(replies, {"id": request["id"], **answer})
        except ValueError as error:  # over the limit: nothing of it was written
            reply(replies, {"id": request["id"], "error": f"what an agent returns is short: {error}"})


def go_directly() -> None:
    """A proxy that the environment names cannot reach this host's loopback; clients of all kinds ask these for it."""
    for name in ("no_proxy", "NO_PROXY"):
        os.environ[name] = ",".join(filter(None, [os.environ.get(name, ""), "127.0.0.1"]))


def load_agent(function: str) -> Agent:
    """The function of that name. Raises ConfigError with the module, the name and the cause."""
    module_name, _, name = function.partition(":")
    if not module_name or not name:
        raise ConfigError(f'workflow.agent.function must be "module:function": it is {function!r}')
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"workflow.agent.function {function!r} must import: module {module_name!r} did not ({cause(error)})"
        ) from error
    agent = getattr(module, name, None)
    where = f"module {module_name!r} ({module.__file__})"
    if not callable(agent):
        raise ConfigError(f"workflow.agent.function {function!r} must name a function: {where} has none of that name")
    try:
        inspect.signature(agent).bind({}, "", "")
    except TypeError:
        raise ConfigError(
            f"workflow.agent.function {function!r} must take (row, base_url, api_key): that of {where} does not"
        ) from None
    found: Agent = agent
    return found


def run(agent: Agent, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """What the agent returned, or what went wrong."""
    os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
    try:
        value = agent(row, base_url, api_key)
        if inspect.iscoroutine(value):
            value = asyncio.run(value)
        return {"returned": read_returned(value)}
    except BaseException as error:  # noqa: BLE001  whatever the agent raises, SystemExit too, is how it ended
        return explain(error, agent)


def read_returned(value: object) -> dict[str, Any]:
    """Fields for the reward function: of a number or a Score its reward, of nothing none.

    Raises TypeError or ValueError for what JSON cannot hold.
    """
    if value is None:
        return {}
    if isinstance(value, Score):
        value = {"reward": value.reward, "correct": value.correct}
    elif isinstance(value, bool):
        value = {"reward": float(value), "correct": value}
    elif isinstance(value, Real):
        value = {"reward": float(value)}
    if not isinstance(value, dict):
        raise TypeError(f"an agent returns a number, a Score, an object of fields or nothing: {type(value).__name__}")
    reward = value.get("reward")
    if isinstance(reward, float) and not math.isfinite(reward):
        raise ValueError(f"a reward must be finite: it is {reward}")
    text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    text.encode()  # UnicodeEncodeError, a ValueError, for half a character
    found: dict[str, Any] = json.loads(text)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]))
