"""Values of a reward function: the columns of a row that it gets, and what it returned.

Rows have fields of loading and workers, too. Returned: a number, a yes or no, a Score, or verl's dict.
"""

import base64
import math
import struct
from collections.abc import Mapping
from typing import Any, SupportsFloat

from actors.data.fields import MESSAGES, REPLACED, UNREAD
from actors.rewards.protocol import Score
from areal_bus.core.parts.reward_parts import checked, of_roles

TOKEN_IDS = "token_ids"  # {"prompt": [...], "completion": [...]}, for functions with `needs_token_ids`
ADDED = (MESSAGES, REPLACED, UNREAD, TOKEN_IDS)

Row = Mapping[str, Any]


def columns_of(row: Row) -> dict[str, Any]:
    """The row's fields with their own values: an answer that is a number in the file is a number here."""
    return {name: value for name, value in {**row, **row.get(REPLACED, {})}.items() if name not in ADDED}


def chat_of(row: Row) -> list[Any] | None:
    """The chat messages of the prompt; None where the row has text."""
    for value in (row.get("prompt"), row.get(MESSAGES)):
        if isinstance(value, list):
            return value
    return None


def encode_ids(ids: bytes, n_prompt: int) -> dict[str, Any]:
    """Token ids (int32, little-endian) for a worker's request: `n_prompt` of the prompt, then those sampled."""
    return {"ids": base64.b64encode(ids).decode(), "n_prompt": n_prompt}


def decode_ids(request: Mapping[str, Any]) -> dict[str, list[int]]:
    """The value of TOKEN_IDS."""
    raw, n_prompt = base64.b64decode(request["ids"]), request["n_prompt"]
    ids = list(struct.unpack(f"<{len(raw) // 4}i", raw))
    return {"prompt": ids[:n_prompt], "completion": ids[n_prompt:]}


def with_ids(function: object, row: dict[str, Any], ids: bytes, n_prompt: int) -> dict[str, Any]:
    """The row for a function that is called in this process."""
    if not getattr(function, "needs_token_ids", False):
        return row
    return {**row, TOKEN_IDS: decode_ids(encode_ids(ids, n_prompt))}


def token_ids_of(row: Row) -> tuple[list[int], list[int]]:
    """(prompt, completion). Raises LookupError where the caller of the function has none."""
    if TOKEN_IDS not in row:
        raise LookupError("this reward function takes token ids, but only texts are scored here")
    return row[TOKEN_IDS]["prompt"], row[TOKEN_IDS]["completion"]


MAX_REWARD = 1e9  # largest absolute reward: its square must fit float32


def plain(value: Any) -> Any:
    """A scalar of numpy, torch or JAX as Python's own: numpy.bool_ as bool; any other value as it is."""
    if getattr(value, "shape", None) == () and callable(getattr(value, "item", None)):
        return value.item()
    return value


def from_verl(value: Mapping[Any, Any]) -> Score:
    """verl's dict: the reward under "score", correctness under "acc"; other finite numbers are parts, texts are not."""
    if "score" not in value:
        raise TypeError(f'missing key "score" in the dict of a reward function: it has {list(value)[:8]}')
    plain_values = {str(name): plain(one) for name, one in value.items()}
    numbers = {name: one for name, one in plain_values.items() if isinstance(one, bool | int | float)}
    correct = plain_values.get("acc")
    return Score(
        value["score"],
        bool(correct) if correct in (0, 1) else None,
        {name: float(one) for name, one in numbers.items() if name != "score" and math.isfinite(one)},
    )


def read_value(value: object) -> dict[str, Any]:
    """ "reward", "correct" and "parts" of a returned value. Raises TypeError or ValueError when it is invalid."""
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
    parts = checked({**score.parts, **of_roles(score.role_rewards)}) if score else {}
    return {"reward": reward, "correct": correct} | ({"parts": parts} if parts else {})
