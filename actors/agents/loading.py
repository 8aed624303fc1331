"""Builds a built-in agent from workflow.arguments."""

import difflib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.agents.multi_turn import MultiTurn
from actors.agents.tools import Tool, ToolCalls, calculator
from actors.rewards.loading import load_reward
from actors.runtime.user_modules import load_function
from areal_bus.errors import ConfigError

Agent = Callable[[Mapping[str, Any], str, str], Any]
AGENTS: Mapping[str, Callable[..., Agent]] = {"multi_turn": MultiTurn, "tools": ToolCalls}
ITSELF = "agent"  # the reward function that reads what an agent returned
TOOLS: Mapping[str, Tool] = {"calculator": calculator}


def load_builtin(order: Mapping[str, Any]) -> Agent:
    """The agent `name` with its `arguments`; `reward`: the options of reward functions, `folder`: of the config.

    Raises ConfigError.
    """
    name, given = order["name"], dict(order["arguments"])
    made = AGENTS[name]
    check(name, given, made)
    if given["reward_fn"] == ITSELF:
        raise ConfigError(f"workflow.arguments.reward_fn must score an answer: {ITSELF!r} is what {name!r} returns")
    try:
        reward_fn = load_reward(given.pop("reward_fn"), Path(order["folder"]), options=order["reward"])
    except ConfigError as error:
        raise ConfigError(str(error).replace("reward.function", "workflow.arguments.reward_fn", 1)) from error
    if "tools" in given:
        given["tools"] = [find_tool(one.strip()) for one in given["tools"].split(",")]
    return made(reward_fn, **given)


def check(name: str, given: Mapping[str, Any], made: Callable[..., Any]) -> None:
    """Raises ConfigError for arguments that the agent does not take, lacks, or takes as another type."""
    parameters = inspect.signature(made).parameters
    for argument, value in given.items():
        if argument not in parameters:
            near = difflib.get_close_matches(argument, parameters, 1, 0.5)
            hint = f"the nearest is {near[0]}" if near else f"it takes {', '.join(parameters)}"
            raise ConfigError(f"workflow.function = {name!r} takes no argument {argument}: {hint}")
        default = parameters[argument].default
        kinds: tuple[type, ...] = (str,) if default is inspect.Parameter.empty else (type(default),)
        kinds = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, kinds) or isinstance(value, bool):
            words = {str: "a text", int: "a whole number", float: "a number"}[kinds[0]]
            raise ConfigError(f"workflow.arguments.{argument} of {name!r} must be {words}: it is {value!r}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in given:
            raise ConfigError(f"workflow.function = {name!r} needs {argument}: set workflow.arguments.{argument}")


def find_tool(name: str) -> Tool:
    """A built-in tool, or "module:function" from the config's folder. Raises ConfigError."""
    if name in TOOLS:
        return TOOLS[name]
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise ConfigError(
            f'workflow.arguments.tools must list {", ".join(TOOLS)} or "module:function", with commas: it has {name!r}'
        )
    return load_function("workflow.arguments.tools", name)
