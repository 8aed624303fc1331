"""The training loop, and how a user's own loop of the same signature is found."""

from collections.abc import Callable
from typing import Any

from actors.learner.link.rollout import Rollout
from actors.learner.update.ppo import PPOActor
from actors.runtime.user_code import load_function
from areal_bus.errors import ConfigError

Loop = Callable[[Rollout, PPOActor], Any]


def train(rollout: Rollout, actor: PPOActor) -> None:
    """PPO: one update per batch until there are no more. The same loop serves eta = 0 and eta > 0."""
    while (batch := rollout.prepare_batch()) is not None:
        batch = actor.compute_advantages_and_returns(batch)
        actor.ppo_update(batch)


def find_loop(name: str) -> Loop:
    """ "ppo", or "module:function" found on sys.path (the config's folder is on it). Raises ConfigError."""
    if name == "ppo":
        return train
    module_name, colon, function_name = name.partition(":")
    if not (module_name and colon and function_name):
        raise ConfigError(f'unknown learner.loop {name!r}: it is "ppo" or "module:function"')
    return load_function("learner.loop", name)
