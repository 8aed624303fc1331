"""Whose signature a reward function has: ours or verl's (bound by name), TRL's (lists) or AReaL's (with token ids)."""

import inspect
from collections.abc import Collection, Sequence

from areal_bus.errors import ConfigError

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
