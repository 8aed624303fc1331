"""The agent of workflow.function = "multi_turn": a wrong answer is answered, and the model tries again."""

from collections.abc import Mapping
from string import Formatter
from typing import Any

from actors.agents.model import ConversationFull, EndpointModel
from actors.agents.scoring import AnswerScore, is_right, with_counts
from actors.rewards.protocol import RewardFunction
from areal_bus.errors import ConfigError

RETRY = "Your answer is wrong. Please try again."


class MultiTurn:
    """Up to `max_turns` answers to one question; the last one counts."""

    def __init__(
        self, reward_fn: RewardFunction, *, max_turns: int = 2, discount: float = 1.0, retry: str = RETRY
    ) -> None:
        """`discount`: of the reward, for each answer after the first. `retry`: the message after a wrong answer, with
        {fields} of the row. Raises ConfigError.
        """
        if max_turns < 1:
            raise ConfigError(f"workflow.arguments.max_turns must be at least 1: it is {max_turns}")
        try:
            list(Formatter().parse(retry))
        except ValueError as error:
            raise ConfigError(f"workflow.arguments.retry must be a template: {retry!r}: {error}") from error
        self._score, self._max_turns, self._discount, self._retry = AnswerScore(reward_fn), max_turns, discount, retry

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        model, messages = EndpointModel(base_url, api_key), list(row["messages"])
        answer = model.answer(messages)
        for turn in range(1, self._max_turns + 1):
            score = self._score(messages, answer, row)
            if "reward_error" in score or is_right(score) or turn == self._max_turns:
                break
            messages += [answer, {"role": "user", "content": self._retry.format_map(row)}]
            try:
                answer = model.answer(messages)
            except ConversationFull:
                break
        if "reward" in score:
            score["reward"] *= self._discount ** (turn - 1)
        return with_counts(score, n_turns=turn)
