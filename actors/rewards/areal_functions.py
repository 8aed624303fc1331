"""Reward functions of AReaL: (prompt, completion, prompt_ids, completion_ids, **row), the first four by position."""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actors.rewards.columns import columns_of, token_ids_of
from actors.rewards.protocol import RewardFunction, Score
from areal_bus.errors import ConfigError

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
    check(others, what, fields)
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


def check(others: Sequence[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    for parameter in others:
        if parameter.default is parameter.empty and fields is not None and parameter.name not in fields:
            raise ConfigError(
                f"{what} takes {parameter.name!r}, a field of AReaL's rows, but not every row has it: the fields are "
                f"{', '.join(sorted(fields))}; add it, or give the parameter a default"
            )
