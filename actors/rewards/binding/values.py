"""Reads what a reward function returned: a number, a yes or no, a Score, or verl's dict."""

import math
from collections.abc import Mapping
from typing import Any, SupportsFloat

from actors.rewards.protocol import Score
from areal_bus.core.parts.reward_parts import checked

MAX_REWARD = 1e9  # largest absolute reward: its square must fit float32


def plain(value: Any) -> Any:
    """A scalar of numpy, torch or JAX as Python's own: numpy.bool_ as bool; any other value as it is."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    return value


def from_verl(value: Mapping[Any, Any]) -> Score:
    """verl's dict: the reward under "score", correctness under "acc"; other finite numbers are parts, texts are not."""
    if "score" not in value:
        raise TypeError(f'a reward function that returns a dict has its reward under "score": it has {list(value)[:8]}')
    plain_values = {str(name): plain(one) for name, one in value.items()}
    numbers = {name: one for name, one in plain_values.items() if isinstance(one, bool | int | float)}
    correct = plain_values.get("acc")
    return Score(
        value["score"],
        bool(correct) if correct in (0, 1) else None,
        {name: float(one) for name, one in numbers.items() if name != "score" and math.isfinite(one)},
    )


def read_value(value: object) -> dict[str, Any]:
    """The fields "reward" and "correct" of a returned value, and "parts" if it reports any.

    Raises TypeError or ValueError when it is invalid.
    """
    value = from_verl(value) if isinstance(value, Mapping) else plain(value)
    score = value if isinstance(value, Score) else None
    number: object = plain(score.reward) if score else value
    correct: object = plain(score.correct) if score else value if isinstance(value, bool) else None
    if not isinstance(correct, bool | None):
        raise TypeError(f"Score.correct must be True, False or None: it is a {type(correct).__name__}")
    if isinstance(number, str | bytes) or not isinstance(number, (float, int, SupportsFloat)):  # the slow check last
        raise TypeError(f"a reward function must return a number or a Score: it returned a {type(number).__name__}")
    reward = float(number)
    if not math.isfinite(reward):
        raise ValueError(f"a reward must be finite: it is {reward}")
    if abs(reward) > MAX_REWARD:
        raise ValueError(f"a reward must be at most {MAX_REWARD:g} in absolute value: it is {reward:g}")
    parts = checked(score.parts) if score and score.parts else {}
    return {"reward": reward, "correct": correct} | ({"parts": parts} if parts else {})
