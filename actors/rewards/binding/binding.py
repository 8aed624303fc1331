"""Binds a reward function's parameters to prompt, completion and row: ours, verl's, TRL's, AReaL's (docs/rewards.md).

TRL's lists have one item here: scores are computed one at a time, each with its deadline and verdict.
"""

import asyncio
import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actors.rewards.binding.values import chat_of, columns_of, plain, token_ids_of
from actors.rewards.protocol import NotApplicable, RewardFunction, Score
from areal_bus.errors import ConfigError

Row = Mapping[str, Any]
Fill = Callable[[str, str, Row], Any]


GIVEN = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
ABSENT = ("trainer_state", "environments")  # of the trainer, which is another process
NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of a row: TRL passes these as lists of its own


NAMED, TRL, TRL_TEXT, TRL_CHAT, AREAL = "named", "trl", "trl_text", "trl_chat", "areal"
AUTO = "auto"
TRL_NAMES = ("prompts", "completions", "completion_ids", "environments")
AREAL_NAMES = ("prompt_ids",)  # TRL has no such name
OUR_NAMES = ("prompt", "completion", "row", "solution_str")  # not ground_truth: a usual column of TRL's rows
REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def signature_of(parameters: Collection[inspect.Parameter], what: str) -> str:
    """NAMED, TRL or AREAL, by the names of the parameters. Raises ConfigError where they are of two systems."""
    names = [parameter.name for parameter in parameters if parameter.kind not in REST]
    lists, ours = among(names, TRL_NAMES), among(names, OUR_NAMES)
    if others := among(names, AREAL_NAMES):
        if only_ours := among(names, ("row", "solution_str")):
            raise ambiguous(what, only_ours, "ours or verl's", others, "AReaL's")
        return AREAL
    if lists and ours:
        raise ambiguous(what, ours, "ours or AReaL's", lists, "TRL's")
    if texts := [p.name for p in parameters if p.name in lists and p.annotation in (str, "str")]:
        raise ambiguous(what, [f"{texts[0]}: str"], "a text, as AReaL's", lists, "TRL's lists")
    return TRL if lists else NAMED


def among(names: Sequence[str], known: Sequence[str]) -> list[str]:
    return [name for name in names if name in known]


def ambiguous(what: str, first: list[str], whose: str, second: list[str], whose_second: str) -> ConfigError:
    return ConfigError(
        f"{what} has parameters of two systems, {', '.join(first)} ({whose}) and {', '.join(second)} ({whose_second}): "
        'set reward.signature = "trl" (lists), "areal" (prompt, completion, prompt_ids, completion_ids) or "named"'
    )


def bind_trl(
    function: Callable[..., Any],
    named: Sequence[inspect.Parameter],
    what: str,
    fields: Collection[str] | None,
    form: str,
) -> RewardFunction:
    """Wrap the function as (prompt, completion, row); `form`: TRL's or prompts'. Raises ConfigError."""
    check_trl(named, what, fields)
    names = {parameter.name for parameter in named}
    takes_all = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in inspect.signature(function).parameters.values())

    @functools.wraps(function)
    def score(prompt: str, completion: str, row: Row, /) -> float | Score:
        metrics: dict[str, float] = {}
        given = arguments(prompt, completion, row, form, metrics)
        if "completion_ids" in names:
            given["completion_ids"] = [token_ids_of(row)[1]]
        reward = plain(only(function(**{name: value for name, value in given.items() if takes_all or name in names})))
        if reward is None:
            raise NotApplicable(f"{what} returned None, which means that it does not apply to this row")
        correct = reward if isinstance(reward, bool) else None
        return Score(reward, correct, metrics) if metrics else reward

    score.needs_token_ids = "completion_ids" in names  # type: ignore[attr-defined]
    return score


def check_trl(named: Sequence[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    for parameter in named:
        name = parameter.name
        if parameter.kind == inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{what} is called with its arguments by name, as TRL does: {name!r} is positional only")
        if name in GIVEN or parameter.kind in REST or parameter.default is not parameter.empty:
            continue
        if name in ABSENT:
            raise ConfigError(f"unknown parameter {name!r} of {what}: no reward process has it; give it a default")
        if fields is not None and name not in fields:
            raise ConfigError(
                f"missing field {name!r}: {what} takes this column of TRL's rows, and every row has only "
                f"{', '.join(sorted(fields))}; add it, or give the parameter a default"
            )


def arguments(prompt: str, completion: str, row: Row, form: str, metrics: dict[str, float]) -> dict[str, Any]:
    """All arguments by name. Chat messages where the row has them, or where `form` says so."""
    chat = chat_of(row) if form in (TRL, TRL_CHAT) else None
    if form == TRL_CHAT and chat is None:
        chat = [{"role": "user", "content": prompt}]
    columns = {name: [value] for name, value in columns_of(row).items() if name not in NO_COLUMNS}
    return {
        **columns,
        "prompts": [prompt if chat is None else chat],
        "completions": [completion if chat is None else [{"role": "assistant", "content": completion}]],
        "log_extra": lambda column, values: None,  # no table of completions here: the journal keeps every sample
        "log_metric": lambda name, value: metrics.update({str(name): float(value)}),
    }


def only(rewards: Any) -> Any:
    """The one item. Raises TypeError for anything but a list (or array) of one."""
    if isinstance(rewards, str | bytes | Mapping) or not hasattr(rewards, "__len__"):
        raise TypeError(
            f"invalid result of a reward function with lists: a {type(rewards).__name__}, not a list of one reward"
        )
    if len(rewards) != 1:
        raise TypeError(f"a reward function returns one reward for each completion: it returned {len(rewards)} for 1")
    return rewards[0]


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
    """Wrap the function as (prompt, completion, row); `fields`: of every row; `signature`: as reward.signature.

    Without a signature it is called by position; coroutines run to their end. ConfigError: a parameter stays unbound.
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
                f"missing field {FROM_ROW[parameter.name]!r} in some rows: {what} takes it as {parameter.name!r}; "
                "add the field, or give the parameter a default"
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
