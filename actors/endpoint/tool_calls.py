"""Tool calls that a model writes as JSON within <tool_call> marks (Hermes, Qwen); knows text only."""

import json
import re
from typing import Any

BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def read_hermes(text: str, n_before: int) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first call, and the calls in OpenAI's form, numbered from `n_before` on.

    All of the text and no call where one of them is not what it should be: its agent sees what the model wrote.
    """
    calls: list[dict[str, Any]] = []
    for block in BLOCK.findall(text):
        function = read_function(block)
        if function is None:
            return text, []
        calls.append({"id": f"call_{n_before + len(calls)}", "type": "function", "function": function})
    return (text.partition("<tool_call>")[0], calls) if calls else (text, [])


def read_function(block: str) -> dict[str, str] | None:
    """Name, and arguments as JSON text; None when the block is no call."""
    try:
        record = json.loads(block)
    except (ValueError, RecursionError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        return None
    arguments = record.get("arguments", {})
    return {"name": record["name"], "arguments": json.dumps(arguments)} if isinstance(arguments, dict) else None
