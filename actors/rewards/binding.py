"""Binds the parameters of a reward function by name to prompt, completion and fields of the data row.

Supports our parameter names and verl's (docs/rewards.md).
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from actors.rewards.protocol import RewardFunction, Score
from areal_bus.errors import ConfigError

Row = Mapping[str, Any]
Fill = Callable[[str, str, Row], Any]


def data_source(prompt: str, completion: str, row: Row) -> Any:
    return row["data_source"]


def ground_truth(prompt: str, completion: str, row: Row) -> Any:
    """`reward_model.ground_truth` as in verl's rows, else the row's `ground_truth`, else its `answer`."""
    model = row.get("reward_model")
    if isinstance(model, Mapping) and "ground_truth" in model:
        return model["ground_truth"]
    return row["ground_truth"] if "ground_truth" in row else row["answer"]


def extra_info(prompt: str, completion: str, row: Row) -> Any:
    """The row's `extra_info`, else {}, as in verl."""
    info = row.get("extra_info")
    return {} if info is None else info


NAMES: dict[str, Fill] = {
    "prompt": lambda prompt, completion, row: prompt,
    "completion": lambda prompt, completion, row: completion,
    "row": lambda prompt, completion, row: row,
    "data_source": data_source,
    "solution_str": lambda prompt, completion, row: completion,
    "ground_truth": ground_truth,
    "extra_info": extra_info,
}
FROM_ROW = ("data_source",)  # names without a fallback: the row must have the field
OURS = ["prompt", "completion", "row"]
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def bind(function: Callable[..., Any], name: str, fields: Collection[str] | None = None) -> RewardFunction:
    """Wrap the function as (prompt, completion, row). `fields`: the fields that every row has, if known.

    Raises ConfigError for a parameter that has no default and cannot be bound. A function without a signature (some C
    functions), or with `*args` only, is called with (prompt, completion, row) by position.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return function
    named = [parameter for parameter in parameters if parameter.kind not in REST]
    if [p.name for p in named if p.kind in BY_PLACE] == OURS and len(named) == len(OURS):
        return function
    if not named and any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return function
    check(named, f"reward.function {name!r} ({function_of(name)}{inspect.signature(function)})", fields)
    return bound(function, named, fields)


def check(named: list[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    """Raises ConfigError for the first parameter without a default that cannot be bound."""
    for parameter in named:
        if is_filled(parameter, fields) or parameter.default is not parameter.empty:
            continue
        if parameter.name in NAMES:
            raise ConfigError(
                f"{what} takes {parameter.name!r}, the row's field of that name, but not every row has this field; add "
                f"the field, or give the parameter a default"
            )
        raise ConfigError(
            f"{what} has the parameter {parameter.name!r}, which cannot be bound: parameters are bound by name, and "
            f"the names are {', '.join(NAMES)}; rename it, or give it a default"
        )
    if not any(parameter.name in NAMES for parameter in named):
        raise ConfigError(f"{what} must take at least one of {', '.join(NAMES)}: it takes none")


def is_filled(parameter: inspect.Parameter, fields: Collection[str] | None) -> bool:
    """Whether the parameter is bound to a value."""
    is_there = parameter.name not in FROM_ROW or fields is None or parameter.name in fields
    return parameter.name in NAMES and is_there


def bound(
    function: Callable[..., Any], named: list[inspect.Parameter], fields: Collection[str] | None
) -> RewardFunction:
    """Wrap the function. A parameter that is not bound, or whose field the row lacks, keeps its default."""
    positional = [p for p in named if p.kind == inspect.Parameter.POSITIONAL_ONLY]  # all: each keeps its place
    keywords = [p for p in named if p.kind != inspect.Parameter.POSITIONAL_ONLY and is_filled(p, fields)]
    filled = {p.name for p in named if is_filled(p, fields)}
    optional = {p.name for p in named if p.name in FROM_ROW and p.default is not p.empty}

    @functools.wraps(function)
    def score(prompt: str, completion: str, row: Row, /) -> float | Score:
        def has(p: inspect.Parameter) -> bool:
            return p.name in filled and (p.name not in optional or p.name in row)

        values = (NAMES[p.name](prompt, completion, row) if has(p) else p.default for p in positional)
        given = {p.name: NAMES[p.name](prompt, completion, row) for p in keywords if has(p)}
        value: float | Score = function(*values, **given)
        return value

    return score


def function_of(name: str) -> str:
    return name.rpartition(":")[2]
