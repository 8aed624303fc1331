"""The strictest reward: 1 when the completion is the row's answer, apart from white space around it, else 0."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    right = completion.strip() == row["answer"].strip()
    return Score(float(right), correct=right)
