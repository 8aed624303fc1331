"""Numbers as people write them (-7, 1,000, 3.50), read exactly; knows no formula, unit or language."""

import re
from decimal import Decimal

DIGITS = r"(?:[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?"
NUMBER = re.compile(rf"-?{DIGITS}")
# A minus belongs to a number where it cannot be a subtraction or a hyphen: after nothing, a space, "=", ":" or "(".
IN_TEXT = re.compile(rf"(?:(?<![^\s=:($*])-)?(?<![0-9.]){DIGITS}(?![0-9])")


def read_number(text: str) -> Decimal | None:
    """The number that `text` is, apart from spaces around it; None when it is anything else."""
    text = text.strip()
    return to_decimal(text) if NUMBER.fullmatch(text) else None


def last_number(text: str) -> Decimal | None:
    """The last number in `text`, None when there is none."""
    found = IN_TEXT.findall(text)
    return to_decimal(found[-1]) if found else None


def to_decimal(written: str) -> Decimal:
    return Decimal(written.replace(",", ""))
