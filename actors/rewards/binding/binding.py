"""Binds the parameters of a reward function to prompt, completion and fields of the data row.

Our parameter names and verl's are bound by name here; functions of TRL and AReaL have modules of their own
(docs/rewards.md).
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actors.rewards.binding.columns import columns_of, token_ids_of
from actors.rewards.binding.signatures import AREAL, AUTO, NAMED, REST, signature_of
from actors.rewards.binding.trl_functions import bind_trl, only
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
LISTS = {"data_sources": "data_source", "solution_strs": "solution_str", "ground_truths": "ground_truth",
         "extra_infos": "extra_info"}  # fmt: skip
FROM_ROW = {"data_source": "data_source", "data_sources": "data_source"}  # name without a fallback: field of the row
OURS = ["prompt", "completion", "row"]
BY_PLACE = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def listed(fill: Fill) -> Fill:
    """For verl's batch reward managers: a list of one."""
    return lambda prompt, completion, row: [fill(prompt, completion, row)]


NAMES |= {several: listed(NAMES[one]) for several, one in LISTS.items()}


def bind(
    function: Callable[..., Any], name: str, fields: Collection[str] | None = None, *, signature: str = AUTO
) -> RewardFunction:
    """Wrap the function as (prompt, completion, row). `fields`: the fields that every row has, if known. `signature`:
    as reward.signature.

    Raises ConfigError for a parameter that has no default and cannot be bound. A function without a signature (some C
    functions), or with `*args` only, is called with (prompt, completion, row) by position. A coroutine function is run
    to its end.
    """
    function = run_to_end(function)
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError:
        return function
    named = [parameter for parameter in parameters if parameter.kind not in REST]
    what = f"reward.function {name!r} ({function_of(name)}{inspect.signature(function)})"
    kind = signature_of(parameters, what) if signature == AUTO else signature
    if kind == AREAL:
        return bind_areal(function, named, what, fields)
    if kind != NAMED:
        return bind_trl(function, named, what, fields, kind)
    if [p.name for p in named if p.kind in BY_PLACE] == OURS and len(named) == len(OURS):
        return function
    if not named and any(p.kind == inspect.Parameter.VAR_POSITIONAL for p in parameters):
        return function
    check(named, what, fields)
    return bound(function, named, fields)


def check(named: list[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    """Raises ConfigError for the first parameter without a default that cannot be bound."""
    for parameter in named:
        if is_filled(parameter, fields) or parameter.default is not parameter.empty:
            continue
        if parameter.name in NAMES:
            raise ConfigError(
                f"{what} takes {parameter.name!r}, the row's field {FROM_ROW[parameter.name]!r}, but not every row has "
                "this field; add the field, or give the parameter a default"
            )
        raise ConfigError(
            f"{what} has the parameter {parameter.name!r}, which cannot be bound: parameters are bound by name, and "
            f"the names are {known_names()}; rename it, give it a default, or set reward.signature for a function of "
            "TRL or AReaL"
        )
    if not any(parameter.name in NAMES for parameter in named):
        raise ConfigError(f"{what} must take at least one of {known_names()}: it takes none")


def is_filled(parameter: inspect.Parameter, fields: Collection[str] | None) -> bool:
    """Whether the parameter is bound to a value."""
    is_there = parameter.name not in FROM_ROW or fields is None or FROM_ROW[parameter.name] in fields
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
            return p.name in filled and (p.name not in optional or FROM_ROW[p.name] in row)

        values = (NAMES[p.name](prompt, completion, row) if has(p) else p.default for p in positional)
        given = {p.name: NAMES[p.name](prompt, completion, row) for p in keywords if has(p)}
        value: float | Score = function(*values, **given)
        return only(value) if filled & LISTS.keys() else value

    return score


def run_to_end(function: Callable[..., Any]) -> Callable[..., Any]:
    """A coroutine function as a plain one."""
    if not inspect.iscoroutinefunction(function):
        return function

    @functools.wraps(function)
    def run(*values: Any, **given: Any) -> Any:
        return asyncio.run(function(*values, **given))

    return run


def known_names() -> str:
    return ", ".join(name for name in NAMES if name not in LISTS)


def function_of(name: str) -> str:
    return name.rpartition(":")[2]


N_PLACED = 4  # arguments by position


def bind_areal(
    function: Callable[..., Any], named: Sequence[inspect.Parameter], what: str, fields: Collection[str] | None
) -> RewardFunction:
    """Wrap the function as (prompt, completion, row). Raises ConfigError for another signature."""
    placed = [p.name for p in named if p.kind != inspect.Parameter.KEYWORD_ONLY][:N_PLACED]
    if len(placed) < N_PLACED:
        raise ConfigError(
            f"{what} must take AReaL's (prompt, completion, prompt_ids, completion_ids) by position: it takes "
            f"{len(placed)}"
        )
    others = [parameter for parameter in named if parameter.name not in placed]
    check_areal(others, what, fields)
    names = {parameter.name for parameter in others}
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    @functools.wraps(function)
    def score(prompt: str, completion: str, row: Mapping[str, Any], /) -> float | Score:
        columns = {name: value for name, value in columns_of(row).items() if name not in placed}
        given = columns if takes_all else {name: value for name, value in columns.items() if name in names}
        value: float | Score = function(prompt, completion, *token_ids_of(row), **given)
        return value

    score.needs_token_ids = True  # type: ignore[attr-defined]
    return score


def check_areal(others: Sequence[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    for parameter in others:
        if parameter.default is parameter.empty and fields is not None and parameter.name not in fields:
            raise ConfigError(
                f"{what} takes {parameter.name!r}, a field of AReaL's rows, but not every row has it: the fields are "
                f"{', '.join(sorted(fields))}; add it, or give the parameter a default"
            )
