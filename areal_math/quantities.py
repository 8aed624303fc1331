r"""Parses quantities: a formula with unit, percent sign, price or multiplier (5 cm, 10%, \$3, 2 million).

Units have canonical names and are not converted (500 cm is not 5 m). Any word may follow a number ("72 clips"), except
words that change it ("5 squared", "5 or 6").
"""

import re
from fractions import Fraction

from areal_math.expressions import Unreadable, constant
from areal_math.formulas import read_formula
from areal_math.kinds import Quantity

KNOWN = {
    **dict.fromkeys(("m", "meter", "metre"), "m"),
    **dict.fromkeys(("cm", "centimeter", "centimetre"), "cm"),
    **dict.fromkeys(("mm", "millimeter", "millimetre"), "mm"),
    **dict.fromkeys(("km", "kilometer", "kilometre"), "km"),
    **dict.fromkeys(("in", "inch", "inche"), "in"),
    **dict.fromkeys(("ft", "foot", "feet"), "ft"),
    **dict.fromkeys(("yd", "yard"), "yd"),
    **dict.fromkeys(("mi", "mile"), "mi"),
    **dict.fromkeys(("g", "gram"), "g"),
    **dict.fromkeys(("kg", "kilogram"), "kg"),
    **dict.fromkeys(("mg", "milligram"), "mg"),
    **dict.fromkeys(("lb", "lbs", "pound"), "lb"),
    **dict.fromkeys(("oz", "ounce"), "oz"),
    **dict.fromkeys(("l", "L", "liter", "litre"), "l"),
    **dict.fromkeys(("ml", "mL", "milliliter", "millilitre"), "ml"),
    **dict.fromkeys(("s", "sec", "second"), "s"),
    **dict.fromkeys(("min", "minute"), "min"),
    **dict.fromkeys(("h", "hr", "hour"), "h"),
    **dict.fromkeys(("ms", "millisecond"), "ms"),
    **dict.fromkeys(("deg", "degree"), "degree"),
    **dict.fromkeys(("rad", "radian"), "rad"),
    **dict.fromkeys(("$", "dollar", "usd", "USD", "buck"), "dollar"),
    **dict.fromkeys(("€", "euro", "eur", "EUR"), "euro"),
    **dict.fromkeys(("£", "gbp", "GBP"), "sterling"),
    **dict.fromkeys(("¢", "cent"), "cent"),
    **dict.fromkeys(("day",), "day"),
    **dict.fromkeys(("week",), "week"),
    **dict.fromkeys(("month",), "month"),
    **dict.fromkeys(("yr", "year"), "year"),
    **dict.fromkeys(("mph",), "mi/h"),
    **dict.fromkeys(("kmh", "kph"), "km/h"),
    **dict.fromkeys(("unit",), "unit"),
}
SHORT = {"m", "g", "s", "h", "l", "L"}  # may also be symbols
ALTERING = {  # words after a number that change its value
    *(
        "plus",
        "minus",
        "times",
        "over",
        "divided",
        "squared",
        "cubed",
        "factorial",
        "root",
        "pi",
        "mod",
        "modulo",
        "base",
    ),
    *("choose", "half", "halves", "third", "thirds", "quarter", "quarters", "fourth", "fourths", "fifth", "fifths"),
    *("sixth", "sixths", "sevenths", "eighth", "eighths", "ninths", "tenth", "tenths", "hundredth", "hundredths"),
    *("thousandth", "thousandths", "i", "e", "x", "y", "z", "n"),
}
CHANGING = ALTERING | {  # and words after which it is not the answer, or not the only one
    *(
        "or",
        "and",
        "not",
        "to",
        "than",
        "is",
        "are",
        "equals",
        "but",
        "if",
        "remainder",
        "power",
        "between",
        "from",
        "by",
    ),
    *("maybe", "perhaps", "unless", "either", "nor", "versus", "vs"),
}
MULTIPLIERS = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
AFTER_UNIT = {
    "in",
    "for",
    "of",
    "on",
    "at",
    "long",
    "wide",
    "tall",
    "high",
    "total",
    "left",
    "altogether",
    "away",
    "each",
}
WORD = re.compile(r"[A-Za-z$€£¢°]+|/|\^\{?(\d)\}?")
MOST_WORDS = 8


def canonical(words: str) -> str:
    """The canonical name of a unit. Raises ValueError for words that change the number before them."""
    parts = [part[0] for part in WORD.finditer(words)]
    if not parts or len(parts) > MOST_WORDS or WORD.sub("", words).strip(" .-"):
        raise ValueError(f"no unit: {words!r}")
    if any(part.lower() in CHANGING or part.lower() in MULTIPLIERS for part in parts):
        raise ValueError(f"not a unit but a part of the number: {words!r}")
    named: list[str] = []
    raised = ""
    for part in parts:
        lower = part.lower()
        if lower in ("square", "sq", "cubic", "cu"):
            raised = "2" if lower.startswith("s") else "3"
        elif part[0] == "^":
            named[-1:] = [(named[-1] if named else "") + part.strip("^{}")]
        elif lower == "per" or part == "/":
            named.append("/")
        elif named and lower in AFTER_UNIT:
            break
        else:
            named.append(name_of(part) + raised)
            raised = ""
    return "".join(named) + raised


def name_of(word: str) -> str:
    for form in (word, word.lower(), word.lower().removesuffix("s")):
        if form in KNOWN:
            return KNOWN[form]
    return word.lower().removesuffix("s")


def is_known(word: str) -> bool:
    """Whether the word is a unit and cannot be a symbol."""
    return word not in SHORT and any(form in KNOWN for form in (word, word.lower(), word.lower().removesuffix("s")))


def multiplier(words: str) -> tuple[Fraction, str]:
    """Split off a multiplier: "million dollars" gives 1000000 and "dollars"."""
    first, _, rest = words.strip().partition(" ")
    factor = MULTIPLIERS.get(first.lower())
    return (Fraction(1), words) if factor is None else (Fraction(factor), rest)


UNIT_TEXT = re.compile(r"\s*\\text\s*\{([^{}]*)\}\s*((?:\^\s*\{?\s*\d\s*\}?)?)\s*$")
UNIT_WORDS = re.compile(r"(?<=[\d})\]])\s+([A-Za-z][A-Za-z.\- /]*(?:\^\{?\d\}?)?(?:/[A-Za-z]+)?)$")
UNIT_TIGHT = re.compile(r"(?<=[\d}])([A-Za-z]{2,12})((?:\^\{?\d\}?)?)$")
DEGREES = re.compile(r"\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))\s*(?:\\text\s*\{\s*)?([CF]?)\s*\}?\s*$")
PERCENT = re.compile(
    r"\s*(?:\\?%|\\text\s*\{\s*(?:\\?%|percent)\s*\}|(?<=[\d} ])(?:percent|per cent|pct))\s*$", re.IGNORECASE
)
MONEY = re.compile(r"^([+-]?)\s*(?:\\text\s*\{\s*)?(\\\$|[€£]|USD|EUR|GBP)\s*\}?\s*")
CENTS = re.compile(r"(?<=[\d}])\s*(?:\\text\s*\{\s*)?(?:¢|\\cents?)\s*\}?$")
ORDINAL = re.compile(r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:\\text\s*\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?$")


def read_quantity(text: str) -> Quantity:
    """Parse a quantity. Raises Unreadable."""
    unit = ""
    if money := MONEY.match(text):
        text, unit = money[1] + text[money.end() :], KNOWN[money[2].lstrip("\\")]
    if found := PERCENT.search(text):
        return Quantity(read_formula(text[: found.start()]), percent=True)
    if found := DEGREES.search(text):
        return Quantity(read_formula(text[: found.start()]), f"degree{found[1]}")
    text = CENTS.sub(r" \\text{cents}", ORDINAL.sub("", text))
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
