"""Built-in rewards: "agent", "exact", "reverse", "sums"; the last two pay half for partly right answers."""

from collections.abc import Mapping
from typing import Any

from actors.rewards.protocol import Score
from areal_math.plain_numbers import last_number, read_number


def agent_score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    returned = row.get("agent", {})
    if returned.get("rejected"):
        raise ValueError("the workflow rejected this sample: it returned None")
    if "reward" not in returned:
        raise ValueError(returned.get("reward_error") or "the agent must return its reward: it returned none")
    parts, role_rewards = returned.get("parts", {}), returned.get("role_rewards", {})
    return Score(returned["reward"], correct=returned.get("correct"), parts=parts, role_rewards=role_rewards)


def exact_score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    right = completion.strip() == row["answer"].strip()
    return Score(float(right), correct=right)


def reverse_score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """0.5 share of positions right (of the longer of both texts) + 0.5 [exactly right]. `correct`: exactly right."""
    gold, given = row["answer"], completion.strip()
    n_right = sum(a == b for a, b in zip(gold, given, strict=False))
    exact = given == gold
    return Score(0.5 * n_right / max(len(gold), len(given)) + 0.5 * exact, correct=exact)


def sums_score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """0.5 [the last number is right] + 0.5 [the completion is exactly the number]. `correct`: that number is right."""
    gold = read_number(row["answer"])
    if gold is None:
        raise ValueError(f"invalid answer of a sum: {row['answer']!r} is not a number")
    right = last_number(completion) == gold
    exact = completion.strip() == row["answer"].strip()
    return Score(0.5 * right + 0.5 * exact, correct=right)
