"""The reward function protocol."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Score:
    """A reward, and whether the answer is correct, if the task defines it. `parts`: numbers for the journal only."""

    reward: float
    correct: bool | None = None
    parts: Mapping[str, float] = field(default_factory=dict)


class NotApplicable(Exception):
    """The function does not apply to this row (TRL's None): a weighted sum leaves it out, alone it is an error."""


class RewardFunction(Protocol):
    """`score(prompt, completion, row)` returns a number or a Score for two texts and the data row.

    A user's function may take fewer parameters, or verl's: `actors.rewards.binding.binding` adapts it.
    """

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> float | Score: ...
