"""Reward of the task "reverse": half for the share of letters in their place, half for the whole word."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """0.5 share of positions right (of the longer of both texts) + 0.5 [exactly right]. `correct`: exactly right."""
    gold, given = row["answer"], completion.strip()
    n_right = sum(a == b for a, b in zip(gold, given, strict=False))
    exact = given == gold
    return Score(0.5 * n_right / max(len(gold), len(given)) + 0.5 * exact, correct=exact)
