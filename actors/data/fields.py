"""Fields of a row by their key, and prompts that are chat messages. Pure: no I/O."""

from collections.abc import Mapping
from typing import Any

Message = dict[str, str]  # "role" and "content", both text
MISSING = object()
MESSAGES = "question_messages"  # where the messages of a row's field "question" go: "question" is text in every row


def messages_of(row: Mapping[str, Any], key: str) -> list[Message] | None:
    """The chat messages that `key` names; None where it names a text. Raises ValueError as read_messages does."""
    value = lookup(row, key)
    if key == "question" and not isinstance(value, list):
        value = row.get(MESSAGES)
    return read_messages(value) if isinstance(value, list) else None


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """The field of that name; else, for a key with dots, the nested one ("reward_model.ground_truth"); else MISSING."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def read_messages(value: list[Any]) -> list[Message]:
    """Chat messages with their contents as text. Raises ValueError with the rule that they break."""
    if not value:
        raise ValueError("a prompt of chat messages has at least one: it is empty")
    messages = [read_message(one) for one in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "a prompt of chat messages ends before the assistant speaks: its last message is an assistant's"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("a prompt of chat messages has a user message that is not empty: it has none")
    return messages


def read_message(value: Any) -> Message:
    """A content of parts, as OpenAI's API has it, is joined when all of them are text."""
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError('a chat message is {"role": ..., "content": ...}')
    content = value.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        content = "".join(parts) if all(isinstance(part, str) for part in parts) else None  # type: ignore[arg-type]
    if not isinstance(content, str):
        raise ValueError("the content of a chat message is text, or parts of the type text")
    return {"role": value["role"], "content": content}


def last_user(messages: list[Message]) -> int:
    """Where the last user message is."""
    return max(i for i, message in enumerate(messages) if message["role"] == "user")
