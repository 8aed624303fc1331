"""Loads a reward function by its configured name."""

import importlib
import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from actors.rewards.binding import bind
from actors.rewards.pool import WorkerPool
from actors.rewards.protocol import RewardFunction
from actors.runtime.user_code import cause
from areal_bus.errors import ConfigError

if TYPE_CHECKING:  # workers import this module without the settings
    from areal_bus.config.sections import Config

BUILT_IN = {
    "exact": "actors.rewards.builtin:exact_score",
    "sums": "actors.rewards.builtin:sums_score",
    "reverse": "actors.rewards.builtin:reverse_score",
    "math": "actors.rewards.mathematics:score",
    "agent": "actors.rewards.builtin:agent_score",
}


def load_reward(name: str, folder: str | Path, fields: Collection[str] | None = None) -> RewardFunction:
    """The reward function of that name: a built-in one, or "module:function", with `folder` first on sys.path.

    Its parameters are bound by name; `fields`: the fields that every row has, if known. Raises ConfigError with the
    module, the attribute and the cause. The user's module is imported in this process.
    """
    module_name, separator, attribute = BUILT_IN.get(name, name).partition(":")
    if not (separator and module_name and attribute):
        known = ", ".join(f'"{known}"' for known in BUILT_IN)
        raise ConfigError(f'reward.function must be {known} or "module:function": it is {name!r}')
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"reward.function {name!r} must import: module {module_name!r} did not ({cause(error)}); looked in "
            f"{folder} first"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        found = "has no such name" if function is None else f"has a {type(function).__name__} there"
        raise ConfigError(
            f"reward.function {name!r} must name a function: module {module_name!r} ({module.__file__}) {found}"
        )
    return bind(function, name, fields)


def check_reward(config: "Config", config_folder: str | Path, fields: Collection[str] | None = None) -> None:
    """Load the configured function in a worker process. Raises ConfigError when it does not load, or needs fields that
    the rows (`fields`) do not have.
    """
    with WorkerPool(
        config.reward.function,
        config_folder,
        n_workers=1,
        timeout_s=config.reward.timeout_s,
        max_failed_starts=1,
        fields=fields,
    ) as pool:
        while not pool.ready:
            pool.poll(timeout_s=1.0)
