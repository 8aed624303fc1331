"""Rules across the settings of [data]: one source or several, and the curriculum."""

import re
from collections.abc import Collection

from areal_bus.config.data import DataConfig, SourceConfig
from areal_bus.config.reasoning_gym import task_of

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # also a part of file names and of journal fields
KINDS = ("path", "task", "function")

Rule = tuple[bool, str]  # (whether it is violated, error text)


def data_rules(data: DataConfig, sets: Collection[str]) -> list[Rule]:
    """`sets`: the names in [[evaluate.sets]]."""
    given = [key for key in KINDS if getattr(data, key)]
    return [
        *(_several(data, given, sets) if data.source else _single(data, given)),
        *_options(data),
        *_curriculum(data),
    ]


def _single(data: DataConfig, given: list[str]) -> list[Rule]:
    return [
        (not given, 'data is needed: set data.path, or data.task = "sums"'),
        (
            given == ["task"] and not data.is_generated,
            f"data.task = {data.task!r} has no Hugging Face id here: set data.path to its file",
        ),
        (data.is_generated and bool(data.path), "one data source only: remove data.task or data.path"),
        (bool(data.function) and len(given) > 1, "one data source only: remove data.function, or the other one"),
    ]


def _several(data: DataConfig, given: list[str], sets: Collection[str]) -> list[Rule]:
    labels = [source.label for source in data.source]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    both = sorted(set(labels) & set(sets))
    return [
        (bool(given), f"one source in [data], or several in [[data.source]]: remove {given} of [data], or the tables"),
        *(rule for number, source in enumerate(data.source, start=1) for rule in _source(source, number)),
        (bool(twice), f"each [[data.source]] needs a name of its own: set name where {twice} occurs again"),
        (bool(both), f"a source and a set of [[evaluate.sets]] need different names: {both} is the name of both"),
    ]


def _source(source: SourceConfig, number: int) -> list[Rule]:
    which = repr(source.label) if source.label else f"number {number}"
    given = [key for key in KINDS if getattr(source, key)]
    is_named = given == ["path", "task"] and not DataConfig(task=source.task).is_generated
    found = f"has {' and '.join(given)}" if given else "has none of them"
    return [
        (
            len(given) != 1 and not is_named,
            f"each [[data.source]] needs one of path, task and function: source {which} {found}",
        ),
        (
            source.weight <= 0,
            f"each [[data.source]] needs a weight above 0, its share of the prompts: that of source {which} is "
            f"{source.weight:g}",
        ),
        (
            bool(source.label) and not NAME.fullmatch(source.label),
            f"the name of a [[data.source]] has up to 64 letters, digits and . _ -: set name for source {which}",
        ),
    ]


def _options(data: DataConfig) -> list[Rule]:
    wrong = [part.task for _, part in data.parts if part.task_options and not task_of(part.task)]
    return [
        (
            bool(wrong),
            f'data.task_options are for data.task = "reasoning-gym:NAME": it is {wrong and wrong[0]!r}',
        )
    ]


def _curriculum(data: DataConfig) -> list[Rule]:
    window = data.curriculum
    if window is None:
        return []
    return [
        (
            window.low >= window.high,
            f"data.curriculum.low ({window.low:g}) must be below data.curriculum.high ({window.high:g})",
        ),
        (
            all(part.function for _, part in data.parts),
            "data.curriculum is for rows that are read: a loader decides its order itself; remove [data.curriculum]",
        ),
    ]
