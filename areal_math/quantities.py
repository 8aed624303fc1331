r"""Parses quantities: a formula with unit, percent sign, price or multiplier (5 cm, 10%, \$3, 2 million)."""

import re
from fractions import Fraction

from areal_math.expressions import Unreadable, constant
from areal_math.formulas import read_formula
from areal_math.kinds import Quantity
from areal_math.units import SHORT, canonical, is_known, multiplier

UNIT_TEXT = re.compile(r"\s*\\text\s*\{([^{}]*)\}\s*((?:\^\s*\{?\s*\d\s*\}?)?)\s*$")
UNIT_WORDS = re.compile(r"(?<=[\d})\]])\s+([A-Za-z][A-Za-z.\- /]*(?:\^\{?\d\}?)?(?:/[A-Za-z]+)?)$")
UNIT_TIGHT = re.compile(r"(?<=[\d}])([A-Za-z]{2,12})((?:\^\{?\d\}?)?)$")
DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*(?:\\text\s*\{\s*)?([CF]?)\s*\}?\s*$")
PERCENT = re.compile(
    r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|(?<=[\d} ])(?:percent|per cent|pct))\s*$", re.IGNORECASE
)
MONEY = re.compile(r"^([+-]?)\s*(?:\\text\s*\{\s*)?(\\\$|[€£])\s*\}?\s*")
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?$")


def read_quantity(text: str) -> Quantity:
    """Parse a quantity. Raises Unreadable."""
    unit = ""
    if money := MONEY.match(text):
        text, unit = money[1] + text[money.end() :], {"\\$": "dollar", "€": "euro", "£": "sterling"}[money[2]]
    if found := PERCENT.search(text):
        return Quantity(read_formula(text[: found.start()]), percent=True)
    if found := DEGREES.search(text):
        return Quantity(read_formula(text[: found.start()]), f"degree{found[1]}")
    text = ORDINAL.sub("", text)
    factor, text, beside = unit_of(text)
    if beside and unit and beside != unit:
        raise Unreadable(f"two units: {unit} and {beside}")
    formula = read_formula(text)
    if factor != 1:
        if formula.literal is None:
            raise Unreadable("a number stands before its multiplier")
        formula = constant(formula.literal * factor)
    return Quantity(formula, unit or beside)


def unit_of(text: str) -> tuple[Fraction, str, str]:
    """(multiplier, text before the unit, unit)."""
    if (found := UNIT_TEXT.search(text)) and text[: found.start()].strip():
        head, beside = text[: found.start()], found[1] + found[2].replace(" ", "")
        if not found[1].strip():
            return Fraction(1), head, ""
    elif found := UNIT_WORDS.search(text):
        head, beside = text[: found.start()], found[1]
        if len(found[1]) == 1 and found[1] not in SHORT:
            return Fraction(1), text, ""
    elif (found := UNIT_TIGHT.search(text)) and is_known(found[1]):
        head, beside = text[: found.start()], found[1] + found[2]
    else:
        return Fraction(1), text, ""
    factor, beside = multiplier(beside)
    return factor, head, canonical(beside) if beside.strip() else ""
