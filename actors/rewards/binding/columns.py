"""Columns of a data row as a reward function of another system expects them.

A row has fields that loading and workers add: "question" and "answer" as text, the messages of a question, the values
that this text replaced, columns that were left out, and token ids for functions that take them.
"""

import base64
import struct
from collections.abc import Mapping
from typing import Any

from actors.data.fields import MESSAGES, REPLACED, UNREAD

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
