"""A slow reward function, so that a killed reward has samples in progress."""

import time
from collections.abc import Mapping
from typing import Any

SCORE_S = 0.05


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """The share of the answer's letters that stand at their place."""
    time.sleep(SCORE_S)
    answer = str(row["answer"])
    return sum(one == other for one, other in zip(completion, answer, strict=False)) / max(len(answer), 1)
