"""Environments of the package verifiers by name (workflow.function = "verifiers:NAME"). Imports nothing of it.

An environment brings rows, conversation and reward, so that its name fills in the keys for them.
"""

import re
from collections.abc import Mapping
from typing import Any

from areal_bus.errors import ConfigError

PREFIX = "verifiers:"
HELD_OUT = 100  # problems of an evaluation, at most
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
DATA_KINDS = ("path", "task", "function", "source")
DEFAULTS: Mapping[str, Any] = {  # section.key of what an environment brings
    "data.held_out": HELD_OUT,
    "reward.function": "agent",
    "workflow.agent.tool_calls": "hermes",  # used by environments with tools only
}


def environment_of(function: str) -> str:
    """NAME of "verifiers:NAME"; "" for another workflow or task."""
    return function.removeprefix(PREFIX) if function.startswith(PREFIX) else ""


def fill(tree: dict[str, Any]) -> None:
    """Set the keys of the tree's environment that are not set: rows, reward and form of tool calls.

    Raises ConfigError for an impossible name.
    """
    workflow = tree.get("workflow")
    function = workflow.get("function") if isinstance(workflow, dict) else None
    if not isinstance(function, str) or not function.startswith(PREFIX):
        return
    if not NAME.fullmatch(environment_of(function)):
        raise ConfigError(
            f'workflow.function = "{PREFIX}NAME": a name has letters, digits and _ . / -; it is {function!r}'
        )
    data = tree.setdefault("data", {})
    if isinstance(data, dict) and not any(data.get(kind) for kind in DATA_KINDS):
        data["task"] = function
    for key, value in DEFAULTS.items():
        *sections, last = key.split(".")
        found: Any = tree
        for section in sections:
            found = found.setdefault(section, {}) if isinstance(found, dict) else None
        if isinstance(found, dict):
            found.setdefault(last, value)
