"""The reward function protocol."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

ROUNDING = 1e-9  # of the largest reward of a zero-sum game


@dataclass(frozen=True, slots=True)
class Score:
    """A reward, and whether the answer is correct, if the task defines it.

    `parts`: numbers for the journal only. `role_rewards`: of the roles of an episode, which train their trajectories
    instead of `reward`.
    """

    reward: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)
    role_rewards: Mapping[str, float] = field(default_factory=dict)


def zero_sum(role_rewards: Mapping[str, float]) -> Mapping[str, float]:
    """The rewards as they are. Raises ValueError unless they add up to 0."""
    total = math.fsum(role_rewards.values())
    if not abs(total) <= ROUNDING * max(map(abs, role_rewards.values()), default=0.0):
        raise ValueError(f"mismatch in a zero-sum game: its rewards add up to {total:g}, not 0: {dict(role_rewards)}")
    return role_rewards


class NotApplicable(Exception):
    """The function does not apply to this row (TRL's None): a weighted sum leaves it out, alone it is an error."""


class RewardFunction(Protocol):
    """`score(prompt, completion, row)` returns a number or a Score for two texts and the data row.

    A user's function may take fewer parameters, or verl's: `actors.rewards.binding.binding` adapts it.
    """

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> float | Score: ...
