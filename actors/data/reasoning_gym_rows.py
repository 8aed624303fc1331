"""Problems of reasoning-gym tasks as rows: generated from a seed; held-out problems do not occur in training."""

import difflib
import importlib
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from areal_bus.config.names.reasoning_gym import PREFIX, REFUSED
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command

SOURCE = "reasoning_gym"  # field of a row: {"task": ..., "options": {...}}
HELD_OUT_SEED = 1 << 30  # added to the seed, for problems that are held out
EXTRA = f"it needs the extra reasoning-gym: {install_command('reasoning-gym')}"

Row = dict[str, Any]


def generate(task: str, n: int, *, seed: int, options: Mapping[str, Any]) -> Iterator[Row]:
    """`n` problems. Raises ConfigError for a task or options that cannot be used."""
    problems = data_set(task, json.dumps(dict(options), sort_keys=True), size=n, seed=seed)
    for number in range(n):
        problem = problems[number]
        answer = problem["answer"]
        known = {} if answer is None else {"demonstration": str(answer)}  # for learner.warmup
        yield {
            "question": str(problem["question"]),
            "answer": "" if answer is None else str(answer),
            "metadata": json.loads(json.dumps(problem["metadata"], default=str)),
            SOURCE: {"task": task, "options": dict(options)},
            **known,
        }


def generate_both(
    task: str, n_train: int, n_held_out: int, *, seed: int, options: Mapping[str, Any]
) -> tuple[list[Row], list[Row]]:
    """(training, held-out) problems: no question of the second is in the first. Raises ConfigError."""
    held_out = list(generate(task, n_held_out, seed=seed + HELD_OUT_SEED, options=options)) if n_held_out else []
    known = {row["question"] for row in held_out}
    train = [row for row in generate(task, n_train, seed=seed, options=options) if row["question"] not in known]
    if not train:
        raise ConfigError(
            f"data.task = {PREFIX + task!r} must leave problems to train on: all {n_train} (data.size) are held out; "
            "set data.held_out lower, or options that allow more problems"
        )
    return train, held_out


@lru_cache(maxsize=8)
def data_set(task: str, options: str, *, size: int = 1, seed: int = 0) -> Any:
    """A data set of the package, with options as JSON. Raises ConfigError."""
    if why := REFUSED.get(task):
        raise ConfigError(f"data.task = {PREFIX + task!r} cannot be trained on: {why}")
    try:
        package: Any = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(f"data.task = {PREFIX + task!r} must import the package: {EXTRA} ({error})") from error
    if task not in known:
        near = difflib.get_close_matches(task.replace("-", "_"), known, 1, 0.6)
        hint = f"; the nearest is {PREFIX + near[0]!r}" if near else ""
        raise ConfigError(
            f"data.task = {PREFIX + task!r} must name a task of reasoning-gym: it has none of that name{hint}"
        )
    try:
        return package.create_dataset(task, size=size, seed=seed, **json.loads(options))
    except Exception as error:  # the package checks its options by assert and by TypeError
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"data.task_options must be options of {PREFIX + task!r}: {options}: {reason}") from error
