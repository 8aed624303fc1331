"""Reward "math": 1 if the completion's final answer equals the row's mathematically, else 0."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score
from areal_math.verdict import gold_part, is_right


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """Score 1.0 or 0.0, with `correct`. Raises ValueError when the row's answer cannot be parsed."""
    right = is_right(completion, gold_part(row["answer"]), prompt)
    return Score(float(right), correct=right)
