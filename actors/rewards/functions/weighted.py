"""Several rewards as one: their weighted sum, each reported by name."""

import copy
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from actors.rewards.binding.values import read_value
from actors.rewards.protocol import NotApplicable, RewardFunction, Score
from areal_bus.foreign_text import described


class TermFailed(Exception):
    """One of the rewards has no value, so the sum has none: an error never counts as 0."""


@dataclass(frozen=True, slots=True)
class WeightedTerm:
    """A reward function with its name and weight."""

    name: str
    weight: float
    function: RewardFunction


class WeightedReward:
    """A reward function: the sum over terms of weight * reward. `correct` is that of the first term that judges it."""

    def __init__(self, terms: Iterable[WeightedTerm]) -> None:
        self.terms = tuple(terms)

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> Score:
        """Parts: the reward of each term before its weight, and the parts of a term as TERM/PART. Raises TermFailed.

        A term that does not apply to the row is left out. Raises NotApplicable when none applies.
        """
        rewards, parts, correct = [], {}, None
        for term in self.terms:
            try:
                value = self._value(term, prompt, completion, row)
            except NotApplicable:
                continue
            rewards.append(term.weight * value["reward"])
            parts[term.name] = value["reward"]
            parts |= {f"{term.name}/{name}": part for name, part in value.get("parts", {}).items()}
            correct = value["correct"] if correct is None else correct
        if not rewards:
            raise NotApplicable("one of reward.terms must apply to each row: none applies to this one")
        return Score(math.fsum(rewards), correct, parts)

    @property
    def needs_token_ids(self) -> bool:
        return any(getattr(term.function, "needs_token_ids", False) for term in self.terms)

    def _value(self, term: WeightedTerm, prompt: str, completion: str, row: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return read_value(term.function(prompt, completion, copy.deepcopy(row)))  # a function may change its row
        except NotApplicable:
            raise
        except Exception as error:
            # with the traceback of the cause, which holds the place in the user's code
            failed = TermFailed(f"reward {term.name!r}: {described(error)}")
            raise failed.with_traceback(error.__traceback__) from error
