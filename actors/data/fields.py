"""Reads fields of a row by key, and prompts that are chat messages."""

from collections.abc import Mapping
from typing import Any

Message = dict[str, Any]  # "role" and "content", both text, and other fields of the row's message ("tool_calls")
MISSING = object()
SOURCE = "source_name"  # of a row: the name of its [[data.source]], for the prompt, the reward and the reports
MESSAGES = "question_messages"  # holds the messages of a field "question", because "question" is text in every row

REPLACED = "replaced"  # the file's own values of "question" and "answer", where the text of a row is another

UNREAD = "_unread_columns"  # of a row: by column that was left out, where it is and why it cannot be read


def messages_of(row: Mapping[str, Any], key: str) -> list[Message] | None:
    """The chat messages at `key`; None for a text. Raises ValueError as read_messages does."""
    value = lookup(row, key)
    if key == "question" and not isinstance(value, list):
        value = row.get(MESSAGES)
    return read_messages(value) if isinstance(value, list) else None


def lookup(row: Mapping[str, Any], key: str) -> Any:
    """The field of that name, else the nested field of a dotted key ("reward_model.ground_truth"), else MISSING."""
    if key in row:
        return row[key]
    value: Any = row
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def read_messages(value: list[Any]) -> list[Message]:
    """Chat messages with their contents as text. Raises ValueError with the broken rule."""
    if not value:
        raise ValueError("a prompt of chat messages must have at least one: it is empty")
    messages = [read_message(one) for one in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "a prompt of chat messages must end before the assistant's turn: its last message is an assistant's"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("a prompt of chat messages must have a user message that is not empty: it has none")
    return messages


def read_message(value: Any) -> Message:
    """A chat message with its content as text; text parts in OpenAI's form are joined, null is an empty text. Other
    fields stay for the chat template.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError('a chat message must be {"role": ..., "content": ...}')
    content = value.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content
        ]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError("the content of a chat message must be text, null, or parts of the type text")
        content = "".join(parts)  # type: ignore[arg-type]
    calls = value.get("tool_calls")
    if calls:
        check_calls(calls)
    if content is None and ("content" in value or calls):
        content = ""
    if not isinstance(content, str):
        raise ValueError("the content of a chat message must be text, null, or parts of the type text")
    others = {name: field for name, field in value.items() if field is not None}
    return {**others, "role": value["role"], "content": content}


def check_calls(calls: Any) -> None:
    """Raises ValueError for anything but tool calls in OpenAI's form."""
    for call in calls if isinstance(calls, list) else [None]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not (
            isinstance(function, Mapping)
            and isinstance(function.get("name"), str)
            and isinstance(function.get("arguments", ""), str | Mapping)
        ):
            raise ValueError('tool_calls of a chat message must be [{"function": {"name": "", "arguments": {}}}, ...]')


def last_user(messages: list[Message]) -> int:
    """Index of the last user message."""
    return max(i for i, message in enumerate(messages) if message["role"] == "user")
