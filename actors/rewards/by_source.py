"""The reward of a run with several sources: the function of a row's source, reported by the name of the source."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from actors.data.fields import SOURCE
from actors.rewards.protocol import RewardFunction, Score
from actors.rewards.values import read_value


@dataclass(frozen=True, slots=True)
class RewardBySource:
    """A reward function. A row of no source, of a set in [[evaluate.sets]], is scored by `default`."""

    functions: Mapping[str, RewardFunction]
    default: RewardFunction

    @property
    def needs_token_ids(self) -> bool:
        return any(getattr(one, "needs_token_ids", False) for one in (self.default, *self.functions.values()))

    def __call__(self, prompt: str, completion: str, row: Mapping[str, Any], /) -> Score:
        """Parts: NAME (the reward), NAME/accuracy if the function judges, and parts of the function as NAME/PART."""
        name = str(row.get(SOURCE, ""))
        value = read_value(self.functions.get(name, self.default)(prompt, completion, row))
        reward, correct, parts = value["reward"], value["correct"], value.get("parts", {})
        if name in self.functions:
            judged = {} if correct is None else {f"{name}/accuracy": float(correct)}
            parts = {name: reward, **judged, **{f"{name}/{part}": number for part, number in parts.items()}}
        return Score(reward, correct, parts)
