"""What a reward function is; knows nothing of workers, deadlines or the bus."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """A reward, and whether the task counts the answer as right, where it has such a yes or no."""

    reward: float
    correct: bool | None = None


class RewardFunction(Protocol):
    """`score(prompt, completion, row)`: texts and the data row in; a number, or a Score, out.

    A user's function may take fewer parameters, and verl's: `actors.rewards.binding` makes one of these of it.
    """

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> float | Score: ...
