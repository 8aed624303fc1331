"""Workflows by name that run in worker processes (agents, environments): a name fills in keys that are not set."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from areal_bus.errors import ConfigError

PREFIX = "verifiers:"
HELD_OUT = 100  # problems of an evaluation, at most
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_./-]*")
DATA_KINDS = ("path", "task", "function", "source")
BUILT_IN = ("multi_turn", "tools")
EXTERNAL = "external"  # workflow.agent.function of agents outside the job


def environment_of(function: str) -> str:
    """NAME of "verifiers:NAME"; "" for another workflow or task."""
    return function.removeprefix(PREFIX) if function.startswith(PREFIX) else ""


def fill(tree: dict[str, Any]) -> None:
    """Set the keys that the tree's workflow stands for, if they are not set. Raises ConfigError for a wrong name."""
    workflow = tree.get("workflow")
    function = workflow.get("function") if isinstance(workflow, dict) else None
    if not isinstance(function, str) or not (function in BUILT_IN or function.startswith(PREFIX)):
        return
    if function.startswith(PREFIX):
        if not NAME.fullmatch(environment_of(function)):
            rule = "it may have letters, digits and _ . / -"
            raise ConfigError(f"invalid name in workflow.function = {function!r}: {rule}")
        data = tree.setdefault("data", {})
        if isinstance(data, dict) and not any(data.get(kind) for kind in DATA_KINDS):
            data["task"] = function
        set_default(tree, "data.held_out", HELD_OUT)
    set_default(tree, "reward.function", "agent")
    _fill_sources(tree)


def _fill_sources(tree: Mapping[str, Any]) -> None:
    """The reward of the run is also that of each [[data.source]], before that of the source's task."""
    data, reward = tree.get("data"), tree.get("reward")
    sources = data.get("source") if isinstance(data, dict) else None
    if isinstance(sources, list) and isinstance(reward, dict):
        for source in sources:
            if isinstance(source, dict):
                source.setdefault("reward", reward["function"])


def section_of(tree: dict[str, Any], names: Sequence[str]) -> Any:
    """The section of that name within others, made if it is missing; another value is the schema's to refuse."""
    found: Any = tree
    for name in names:
        if not isinstance(found, dict):
            break
        found = found.setdefault(name, {})
    return found


def set_default(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a key that is not set. A section that is a value stays: Config refuses it."""
    *sections, last = key.split(".")
    if isinstance(found := section_of(tree, sections), dict):
        found.setdefault(last, value)
