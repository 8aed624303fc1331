"""Scores the answer that ends a conversation, with the run's own reward functions."""

from collections.abc import Mapping
from typing import Any

from actors.agents.model import Message
from actors.rewards.binding.values import read_value
from actors.rewards.protocol import RewardFunction
from actors.runtime.user_code import describe
from areal_bus.messages import MAX_PARTS


class AnswerScore:
    """The score of one answer, as fields for the reward function "agent"."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def __call__(self, messages: list[Message], answer: Message, row: Mapping[str, Any]) -> dict[str, Any]:
        """reward, correct and parts. An exception of the function is a `reward_error`, which gives no reward (I10)."""
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        try:
            return read_value(self._function(prompt, answer["content"], row))
        except Exception as error:  # noqa: BLE001  the user's function raises any error
            return {"reward_error": f"workflow.arguments.reward_fn: {describe(error)}"}


def is_right(score: Mapping[str, Any]) -> bool:
    """By `correct`, or for a function without it by a reward of at least 1."""
    correct = score.get("correct")
    return score["reward"] >= 1 if correct is None else bool(correct)


def with_counts(score: Mapping[str, Any], **counts: int) -> dict[str, Any]:
    """The score with counts among its parts, which are MAX_PARTS at most."""
    parts = {**counts, **{name: part for name, part in score.get("parts", {}).items() if name not in counts}}
    return {**score, "parts": dict(list(parts.items())[:MAX_PARTS])}
