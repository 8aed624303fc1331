"""Running mean and deviation of rewards and returns over all batches of a run (actor.reward_scaling = "running").

A state is (3,) float64: how many, mean, sum of squared distances from it; batches are merged as Chan, Golub and LeVeque
(1979) do, so it is that of all numbers at once, however they were cut. `RUNNING` are the names under which checkpoints
hold the states. Pure.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.learner.algorithms.advantages import ROUNDING
from areal_bus.config.learner import ActorConfig

REWARDS, RETURNS = "rewards", "returns"
RUNNING = (REWARDS, RETURNS)
Total = Callable[[list[float]], list[float]]  # sums over the learner ranks


def empty() -> Tensor:
    return torch.zeros(3, dtype=torch.float64)


def merged(state: Tensor, values: Tensor, total: Total) -> Tensor:
    """The state with the values of this batch on all ranks; a collective, equal on each rank."""
    n_new, first = total([float(len(values)), float(values.double().sum())])
    mean_new = first / n_new if n_new else 0.0
    (squares_new,) = total([float((values.double() - mean_new).square().sum())])
    n, mean, squares = state.tolist()
    if not n_new:
        return state
    apart, n_all = mean_new - mean, n + n_new
    squares_all = squares + squares_new + apart**2 * n * n_new / n_all
    return torch.tensor([n_all, mean + apart * n_new / n_all, squares_all], dtype=torch.float64)


def deviation(state: Tensor, *, about: float | None = None) -> float:
    """Root of the mean squared distance from the mean, or from `about`; 1 while all numbers are equal."""
    n, mean, squares = state.tolist()
    centre = mean if about is None else about
    found = ((squares / n + (mean - centre) ** 2) if n else 0.0) ** 0.5
    return found if found > ROUNDING * abs(mean) else 1.0


def normalising(settings: ActorConfig, state: Tensor) -> ActorConfig:
    """Settings whose numbers for bias and scaling make (reward - mean) / (deviation + std_eps)."""
    scaling = 1 / (deviation(state) + settings.std_eps)
    return settings.model_copy(update={"reward_bias": -float(state[1]), "reward_scaling": scaling})
