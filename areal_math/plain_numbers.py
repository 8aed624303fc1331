"""Parses decimal numbers as written in text (-7, 1,000, 3.50), exactly."""

import re
from decimal import Decimal

DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
NUMBER = re.compile(rf"-?{DIGITS}")
# A minus is a sign where it cannot be a subtraction or a hyphen: at the start, or after a space, "=", ":" or "(".
IN_TEXT = re.compile(rf"(?:(?<![^\s=:($*])-)?(?<![0-9.]){DIGITS}(?![0-9])")


def read_number(text: str) -> Decimal | None:
    """The number when the stripped `text` is one, else None."""
    text = text.strip()
    return to_decimal(text) if NUMBER.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, or None."""
    found = IN_TEXT.findall(text)
    return to_decimal(found[-1]) if found else None


def to_decimal(written: str) -> Decimal:
    return Decimal(written.replace(",", ""))
