"""Values of a row as JSON has them. A column that cannot be read is left out; only its use refuses a row.

Dates become ISO text, decimals numbers (text where a float would lose digits), bytes text where they are UTF-8, scalars
and arrays of numpy plain numbers. NaN and infinity stay: Python's JSON has them, and tests of programs use them.
"""

import datetime
import math
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

DEEPEST = 100  # levels of lists and objects


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
            unread[str(name)] = str(error)
        else:
            number = values[plain_key(name)]
            if isinstance(number, float) and not math.isfinite(number):
                unread[str(name)] = f"the number {number}"
    return values, unread


def plain(value: Any, depth: int = 0) -> Any:
    """The value as JSON has it. Raises UnreadableValue."""
    if value is None or isinstance(value, bool | int):
        return value
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
        return str(key)
    raise UnreadableValue(f"a key of the type {type(key).__name__}")


def plain_other(value: Any, depth: int) -> Any:
    """A value of a type that JSON does not have."""
    if isinstance(value, Decimal):
        return plain_decimal(value)
    if isinstance(value, datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, datetime.timedelta):
        return value.total_seconds()
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
        return int(value)
    number = float(value)
    return number if Decimal(repr(number)) == value else str(value)
