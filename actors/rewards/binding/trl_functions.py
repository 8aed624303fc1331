"""Reward functions of TRL: lists of prompts and completions and one list for each column, a list of rewards back.

Scores are computed one at a time (each has its deadline and verdict), so every list has one item.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from actors.rewards.binding.columns import chat_of, columns_of, token_ids_of
from actors.rewards.binding.signatures import REST, TRL, TRL_CHAT
from actors.rewards.binding.values import plain
from actors.rewards.protocol import NotApplicable, RewardFunction, Score
from areal_bus.errors import ConfigError

Row = Mapping[str, Any]
GIVEN = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
ABSENT = ("trainer_state", "environments")  # of the trainer, which is another process
NO_COLUMNS = ("prompt", "completion", "completion_ids")  # of a row: TRL passes these as lists of its own


def bind_trl(
    function: Callable[..., Any],
    named: Sequence[inspect.Parameter],
    what: str,
    fields: Collection[str] | None,
    form: str,
) -> RewardFunction:
    """Wrap the function as (prompt, completion, row). `form`: TRL, or which form prompts and completions have.

    Raises ConfigError for a parameter without a default that is no list of TRL's and no field of every row.
    """
    check(named, what, fields)
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


def check(named: Sequence[inspect.Parameter], what: str, fields: Collection[str] | None) -> None:
    for parameter in named:
        name = parameter.name
        if parameter.kind == inspect.Parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{what} is called with its arguments by name, as TRL does: {name!r} is positional only")
        if name in GIVEN or parameter.kind in REST or parameter.default is not parameter.empty:
            continue
        if name in ABSENT:
            raise ConfigError(f"{what} takes {name!r}, which no reward process has: give the parameter a default")
        if fields is not None and name not in fields:
            raise ConfigError(
                f"{what} takes {name!r}, a column of TRL's rows, but not every row has this field: the fields are "
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
            f"a reward function with lists returns a list of one reward: it returned a {type(rewards).__name__}"
        )
    if len(rewards) != 1:
        raise TypeError(f"a reward function returns one reward for each completion: it returned {len(rewards)} for 1")
    return rewards[0]
