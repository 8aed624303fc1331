"""Reward "math_verify": 1 if the library math-verify takes the completion's final answer for the row's, else 0."""

import importlib
import logging
from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score
from areal_math.verdict import gold_part

library: Any = importlib.import_module("math_verify")
logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns without its own time limits: the pool has one


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """Score 1.0 or 0.0, with `correct`. Raises ValueError when the library cannot read the row's answer."""
    answer = gold_part(row["answer"])
    gold = library.parse(f"${answer}$", parsing_timeout=None) or library.parse(answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"unknown form of answer for math-verify: {answer[:200]!r}")
    found = library.parse(completion, parsing_timeout=None)
    right = bool(library.verify(gold, found, timeout_seconds=None))
    return Score(float(right), correct=right)
