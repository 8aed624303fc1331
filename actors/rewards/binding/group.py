"""Calls a user's group reward (`reward.group`): all samples of a prompt at once, one reward each."""

import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from actors.rewards.binding.binding import REST, run_to_end
from actors.rewards.binding.values import read_value
from areal_bus.errors import ConfigError

GROUP_NAMES = ("prompt", "completions", "row", "rewards", "correct")

GroupFunction = Callable[[str, Sequence[Mapping[str, Any]], Mapping[str, Any]], list[float]]


def bind_group(function: Callable[..., Any], name: str) -> GroupFunction:
    """The function as (prompt, samples, row) -> rewards (samples: `messages.Group`), bound by name. ConfigError."""
    called = run_to_end(function)
    named = [p for p in inspect.signature(called).parameters.values() if p.kind not in REST]
    unknown = [p.name for p in named if p.name not in GROUP_NAMES and p.default is p.empty]
    if unknown or not any(p.name in GROUP_NAMES for p in named):
        what = f"unknown parameter {unknown[0]!r}" if unknown else "no known parameter"
        raise ConfigError(f"{what} of reward.group {name!r}: it takes some of {', '.join(GROUP_NAMES)}, by name")

    def rewards_of(prompt: str, samples: Sequence[Mapping[str, Any]], row: Mapping[str, Any]) -> list[float]:
        given = {
            "prompt": prompt,
            "completions": [sample["completion"] for sample in samples],
            "row": row,
            "rewards": [sample["reward"] for sample in samples],
            "correct": [sample["correct"] for sample in samples],
        }
        return read_rewards(called(**{p.name: given[p.name] for p in named if p.name in given}), len(samples))

    return rewards_of


def read_rewards(value: Any, n: int) -> list[float]:
    """The returned rewards. Raises TypeError or ValueError unless they are n finite numbers."""
    if isinstance(value, str | bytes | Mapping | Set) or not hasattr(value, "__len__"):
        raise TypeError(f"reward.group must return a list of rewards: it returned a {type(value).__name__}")
    if len(value) != n:
        raise ValueError(f"reward.group must return one reward for each sample: it returned {len(value)} for {n}")
    return [read_value(one)["reward"] for one in value]
