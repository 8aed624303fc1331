"""Reward of the task "sums": half for the right last number, half for saying nothing but it.

A strict reward alone is 0 for nearly every first answer of a small model and teaches nothing; the first half gives it
something to climb.
"""

from collections.abc import Mapping
from typing import Any

from actors.rewards.plain_numbers import last_number, read_number
from actors.rewards.protocol import Score


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """0.5 [the last number is right] + 0.5 [the completion is exactly the number]. `correct`: the last number is."""
    gold = read_number(row["answer"])
    if gold is None:
        raise ValueError(f"the answer of a sum must be a number: it is {row['answer']!r}")
    right = last_number(completion) == gold
    exact = completion.strip() == row["answer"].strip()
    return Score(0.5 * right + 0.5 * exact, correct=right)
