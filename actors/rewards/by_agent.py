"""The reward that an agent itself returned for its conversation; an agent that returned none gets no number (I10)."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    returned = row.get("agent", {})
    if "reward" not in returned:
        raise ValueError("the agent must return its reward: it returned none")
    return Score(returned["reward"], correct=returned.get("correct"))
