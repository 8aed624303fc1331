r"""Finds the value that a sentence states: "So she sold 72 clips in May."

Of several values, the stated one is the only one after "=" or the last verb; otherwise there is none.
"""

import re

from areal_math.quantities import ALTERING, MULTIPLIERS, SHORT, is_known

KEPT = {*ALTERING, *MULTIPLIERS, "%", r"\%", "°", "percent", "or"}
DIVISORS = (  # 12/day is a value with a unit, 12/three and 12/sin x are computations
    *("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve", "twenty"),
    *("seventh", "ninth", "twelfth", "twelfths", "sin", "cos", "tan", "cot", "sec", "csc", "log", "exp", "sqrt", "abs"),
)
SPAN = re.compile(
    r"\$\$(?P<two>[^$]+)\$\$|(?<!\\)\$(?P<one>[^$\n]+?)(?<!\\)\$(?!\d)|\\\((?P<round>.+?)\\\)|\\\[(?P<square>.+?)\\\]"
)
MONEY_SPAN = re.compile(r"\s*\d[\d,.]*\s+[A-Za-z*+/=\-].*\s$|.*[=\s]$")
NUMBER = re.compile(
    r"(?<![\w.\\^_{])(?P<value>(?:(?<![\w)\]}])[-−+])?[$€£]?-?(?:\d{1,3}(?:,\d{3})+(?!\d)(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)"
    r"(?:\s+\d+/\d+|/\d+|[eE][+-]?\d+)?(?:\s*(?:%|percent\b|°))?)(?P<unit>\s+[A-Za-z]+)?",
)
NO_RATE = "|".join((*sorted(ALTERING), *sorted(MULTIPLIERS), *DIVISORS))
OPERATED = re.compile(
    rf"[\^!*×÷_]|\s?:\s?[\w(\\$]|/(?!(?!(?:{NO_RATE})\b)[A-Za-z]{{3,}}\b)|\s*[+*/×÷=]\s*[\d$(]|\s-\s*[\d$(]|-\d|\s+\d"
)
VERB = re.compile(
    r"\b(?:is|are|was|were|be|equals?|gives?|gets?|got|makes?|made|has|have|need(?:s|ed)?|total of)\b"
    r"|=|(?<!\d)(?<!\d\s):|:(?![\s\d])"  # in 12:5 it is no verb
)
CUT = re.compile(r",?\s+(?:because|since|so|which|where|as)\b.*$", re.DOTALL)
UNIT_AFTER = re.compile(r"\s*(?:\\?%|°|percent\b|[A-Za-z]+\b)")
DENIAL = re.compile(
    r"\b(?:not|never|neither|nor|wrong|incorrect|false|cannot|fails|impossible|unlike)\b|n['’]t\b|\bruled?\s+out\b"
    r"|\b(?:anything|everything|all|nothing)\s+(?:but|except)\b|\bexcept(?:ing)?\b|\bother than\b"
    r"|\b(?:eliminat|exclud|reject|discard)\w*|\bdiffers?(?:ent)?\s+from\b",
    re.IGNORECASE,
)
BEFORE = re.compile(  # words directly before a number that make it a part of another value, or a bound
    r"\b(?:at least|at most|(?:\w+er|more|less) than|over|under|up to|above|below|nearly|almost|between|exceeds?|beyond"
    r"|negative|minus|plus|half(?: of)?"
    r"|(?:third|quarter|percent|square|cube|power|root|factorial|reciprocal|inverse|opposite|negation"
    r"|multiple|factor|divisor|complement|logarithm|log|sine?|cosine?|product) of"
    r"|twice|double|triple|thrice|times|divided by|divisible by|multiplied by|choose|sqrt|to the)"
    r"\s+(?:the\s+)?[$€£]?$",
    re.IGNORECASE,
)
AFTER = re.compile(
    r"\s*(?:times\b|(?:\w+\s+)?(?:less|more|fewer|greater) than\b|or (?:more|less|fewer|greater)\b"
    r"|at (?:most|least)\b|factorial\b|squared\b|cubed\b|choose\b)",
    re.IGNORECASE,
)
UNSOLVED = re.compile(  # "-x = ", "2x = ", "x + 3 = ": an equation that is still to be solved
    r"(?:[\d√]|(?:^|[\s(])[-−])(?:\(?[a-z]\)?)\s*=\s*[$€£]?$|(?<![A-Za-z])[a-z]\)?\s?[-−+*/×÷]\s?\d+\)?\s*=\s*[$€£]?$"
)
NEGATED = re.compile(  # "The answer is negative 7", not "x minus 7"
    r"(?:^|(?:\b(?:is|are|was|be|equals?|gives?|gets?)|[:=])\s*)(?:negative|minus)\s+$", re.IGNORECASE
)
BOUNDED = re.compile(  # "7 at most", "$7$ maximum"
    r"[\d$)}\]]\s*(?:\\text\s*\{\s*)?(?:at\s+(?:most|least)|or\s+(?:more|less|fewer|greater)|maximum|minimum)\b",
    re.IGNORECASE,
)
NOTATION = re.compile(r"[\\^_{}]")
ESCAPED = re.compile(r"\\[$%,!; ]")
LETTERS = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2}")
LONGEST = 2000
MANY = 20
NEAR = 40  # characters before a value that may alter it


def value_in(sentence: str) -> str | None:
    """The value that the sentence states; None when it states none or several."""
    sentence = sentence.replace("**", "")
    if len(sentence) > LONGEST or "?" in sentence or DENIAL.search(sentence) or not LETTERS.search(sentence):
        return None
    if NOTATION.search(ESCAPED.sub("", SPAN.sub("", sentence))):
        return None  # a formula without delimiters is ambiguous
    items = items_of(sentence)
    if not 0 < len(items) <= MANY:
        return None
    if len(items) == 1:
        return items[0][1] or None
    start = after_verb(sentence, items)
    after = [item for item in items if start is not None and item[0] >= start]
    return after[0][1] if len(after) == 1 else None


def values_in(sentence: str) -> str | None:
    """The text after the last verb, for a sentence with several values: "The roots are 1 and 2"."""
    if len(sentence) > LONGEST or "?" in sentence or DENIAL.search(sentence):
        return None
    start = after_verb(sentence, items_of(sentence))
    return None if start is None else sentence[start:]


def after_verb(sentence: str, items: list[tuple[int, str, int]]) -> int | None:
    verbs = [found.end() for found in VERB.finditer(sentence) if not any(a <= found.start() < b for a, _, b in items)]
    return verbs[-1] if verbs else None


def items_of(sentence: str) -> list[tuple[int, str, int]]:
    """Start, text and end of each value: a delimited formula, or a number outside formulas."""
    found, covered = [], []
    for span in SPAN.finditer(sentence):
        content = next(text for text in span.groups() if text is not None)
        if span["one"] and MONEY_SPAN.fullmatch(content):
            continue
        unit = UNIT_AFTER.match(sentence, span.end())
        value = stated(sentence, span.span(), with_unit(content, unit[0] if unit else ""))
        found.append((span.start(), value, span.end()))
        covered.append(span.span())
    for number in NUMBER.finditer(sentence):
        if any(start <= number.start() < end for start, end in covered):
            continue
        value = with_unit(number["value"], number["unit"] or "")
        is_part = OPERATED.match(sentence, number.end("value")) is not None  # of a formula, not a value
        found.append(
            (number.start(), "" if is_part else stated(sentence, number.span("value"), value), number.end("value"))
        )
    return sorted(found)


def stated(sentence: str, span: tuple[int, int], value: str) -> str:
    """The value that the words next to it leave: negated ("negative 7"), none ("half of 7"), or itself."""
    if NEGATED.search(sentence[max(0, span[0] - NEAR) : span[0]]) and AFTER.match(sentence, span[1]) is None:
        return f"-{value}" if value[:1].isdigit() else ""
    return "" if is_altered(sentence, span) else value


def is_altered(sentence: str, span: tuple[int, int]) -> bool:
    """Whether the words next to a value change it ("half of 7") or make it a bound ("at least $7$")."""
    begin, end = span
    before = sentence[max(0, begin - NEAR) : begin]
    is_after_formula = UNSOLVED.search(before) is not None
    return is_after_formula or BEFORE.search(before) is not None or AFTER.match(sentence, end) is not None


def with_unit(value: str, unit: str) -> str:
    """The value with the following word, if this is a unit or changes the number."""
    word = unit.strip()
    keep = (is_known(word) and word != "in") or word in SHORT or word.lower() in KEPT
    return f"{value} {word}" if keep else value
