"""Reads fields of a row by key, chat prompts, and values as JSON has them.

An unreadable column is left out; only its use refuses a row. Dates become ISO text, decimals numbers or text.
"""

import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any
from uuid import UUID

from areal_bus.foreign_text import valid

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
        raise ValueError("missing messages: the prompt is an empty list of chat messages")
    messages = [read_message(one) for one in value]
    if messages[-1]["role"] == "assistant":
        raise ValueError(
            "a prompt of chat messages must end before the assistant's turn: its last message is an assistant's"
        )
    if not any(message["role"] == "user" and message["content"].strip() for message in messages):
        raise ValueError("missing user message: a prompt of chat messages must have one that is not empty")
    return messages


def read_message(value: Any) -> Message:
    """A chat message with its content as text: OpenAI's text parts joined, null as "". Other fields stay."""
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
    return max(i for i, message in enumerate(messages) if message["role"] == "user")


DEEPEST = 100  # levels of lists and objects
LARGEST = 10**4000  # of whole numbers: Python reads and writes up to 4300 digits


class UnreadableValue(ValueError):
    """A value that JSON does not have; the text describes it."""


def plain_row(row: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The row with plain values, and by column why it was left out, or that it is no finite number."""
    values: dict[str, Any] = {}
    unread: dict[str, str] = {}
    for name, value in row.items():
        try:
            values[plain_key(name)] = plain(value)
        except UnreadableValue as error:
            unread[shown_key(name)] = str(error)
        else:
            number = values[plain_key(name)]
            if isinstance(number, float) and not math.isfinite(number):
                unread[shown_key(name)] = f"the number {number}"
    return values, unread


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON has it. Raises UnreadableValue."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return plain_whole(value)
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, float):
        return float(value)
    if depth > DEEPEST:
        raise UnreadableValue(f"more than {DEEPEST} levels")
    if isinstance(value, Mapping):
        return {plain_key(key): plain(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, depth + 1) for item in value]
    return plain_other(value, depth)


def plain_whole(number: int) -> int:
    if abs(number) >= LARGEST:
        raise UnreadableValue("a whole number of 4001 digits or more")
    return number


def plain_text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UnreadableValue(f"text with the lone surrogate {text[error.start]!r}") from None
    return str(text)


def plain_key(key: Any) -> str:
    if isinstance(key, str):
        return plain_text(key)
    if isinstance(key, int):
        return str(plain_whole(key))
    raise UnreadableValue(f"a key of the type {type(key).__name__}")


def shown_key(key: Any) -> str:
    """The key of any column, also of one that `plain_key` refuses."""
    return (
        f"a whole number of {key.bit_length()} bits"
        if isinstance(key, int) and abs(key) >= LARGEST
        else valid(str(key))
    )


def plain_other(value: Any, depth: int) -> Any:
    if isinstance(value, Decimal):
        return plain_decimal(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes | bytearray):
        try:
            return bytes(value).decode()
        except UnicodeDecodeError:
            raise UnreadableValue(f"{len(value)} bytes that are no UTF-8 text") from None
    module = type(value).__module__.partition(".")[0]
    if module == "numpy" and getattr(value, "dtype", None) in ("float16", "float32") and not value.shape:
        return float(str(value))  # .1 as float32 is .1, and not 0.10000000149011612
    if module in ("numpy", "torch") and hasattr(value, "tolist"):
        listed = list(value) if getattr(value, "shape", ()) and module == "numpy" else value.tolist()
        return plain(listed, depth + 1)
    raise UnreadableValue(f"a value of the type {type(value).__name__}")


def plain_decimal(value: Decimal) -> Any:
    if not value.is_finite():
        return math.nan if value.is_nan() else float(value)
    if value.as_tuple().exponent == 0:
        return plain_whole(int(value))
    number = float(value)
    return number if Decimal(repr(number)) == value else str(value)
