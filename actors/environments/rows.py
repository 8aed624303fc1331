"""Rows of an environment as a run needs them: the environment's own row is one field."""

import json
from collections.abc import Mapping
from typing import Any

from areal_bus.errors import ConfigError

INPUT = "verifiers"  # field of a row: the environment's own row
DEMONSTRATION = "demonstration"  # column that learner.warmup reads

Row = dict[str, Any]


def row_of(given: Mapping[str, Any], prompt: Any, where: str) -> Row:
    """`prompt`: a text or messages, for logs and warm-up. Raises ConfigError for values that are not JSON."""
    try:
        json.dumps(given, ensure_ascii=False).encode()
    except (TypeError, ValueError) as error:
        raise ConfigError(f"a row of an environment must hold JSON values only: {where}: {error}") from error
    row = {"question": question_of(prompt), "answer": str(given.get("answer", "")), INPUT: dict(given)}
    if isinstance(text := given.get(DEMONSTRATION), str):
        row[DEMONSTRATION] = text
    return row


def question_of(prompt: Any) -> str:
    """The last user message of a prompt."""
    if isinstance(prompt, str):
        return prompt
    contents = [message["content"] for message in prompt or [] if message.get("role") == "user"]
    text = contents[-1] if contents else ""
    return text if isinstance(text, str) else json.dumps(text, ensure_ascii=False)
