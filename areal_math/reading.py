r"""Parses an answer: formula, list, brackets, matrix, equation, inequality, number in a base, or words.

A text that is no other kind is words, which equal only the same words.
"""

import re
from collections.abc import Iterable
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache

from areal_math.expressions import Formula, Unreadable, constant, same_values
from areal_math.formulas import LONGEST, read_formula
from areal_math.kinds import Answer, Equation, InBase, Inequality, Matrix, Quantity, Ratio, Several, Words
from areal_math.notation import clean
from areal_math.quantities import read_quantity
from areal_math.ranges import OR, read_range, unturned

DEEPEST = 6  # answers within answers
MOST_ITEMS = 100


EMPTY = Several("{}", ())
NO_SOLUTION = {
    *(r"\emptyset", r"\{\}", "{}", "empty set", "no solution", "no solutions", "no real solution", "no real solutions"),
    *("no solution exists", "no solutions exist", "there is no solution", "there are no solutions"),
}
REALS = {r"\mathbb{R}", "all real numbers", "all reals", "set of real numbers"}
PLAIN = re.compile(r"[+-]?(?:\d{1,40}(?:\.\d{1,40})?|\.\d{1,40})", re.ASCII)
RATIO = re.compile(r"([\d.]+(?:\s*:\s*[\d.]+)+)|(\d+)\s*(?:\\text\s*\{\s*)?to(?:\s*\}|(?![A-Za-z]))\s*(\d+)")
CLOCK = re.compile(r"\d{1,2}:\d\d(?::\d\d)?")
IN_BASE = re.compile(
    r"\(?([0-9A-Fa-f]+)\)?\s*_\s*(?:(\d)|\{\s*(?:\\text\s*\{\s*)?(\w+)\s*\}?\s*\}|\\text\s*\{\s*(\w+)\s*\})"
)
BASE_WORDS = re.compile(
    r"([0-9A-F]+)\s*(?:\\text\s*\{)?\s*\(?\s*(?:in\s+)?base[\s-]+\{?(\w+)\}?\)?\s*\}?", re.IGNORECASE
)
DIGIT_NAMES = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
BASES = {name: base for base, name in enumerate(DIGIT_NAMES, 2)}
MATRIX = re.compile(r"\\begin\s*\{((?:[pbvBV]|small)?matrix|array)\}(?:\s*\{[clr| ]*\})?(.*)\\end\s*\{\1\}", re.DOTALL)
BRACKETED_MATRIX = re.compile(r"^[(\[]\s*(\\begin.*\})\s*[)\]]$", re.DOTALL)
MEMBER = re.compile(r"(\\?[A-Za-z]{1,8}(?:_\{?\w\}?)?)\s*\\in(?![A-Za-z])\s*")
JOINS = re.compile(r"\\text\s*\{\s*,?\s*(?:and|or)\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z])")
LETTERS = re.compile(r"(?!(?:[xyz]{3}|sin|cos|tan)$)[A-Za-z]{3}")  # a word or an order (bac): no product
RELATION = re.compile(r"(\\le(?![A-Za-z])|\\ge(?![A-Za-z])|<=|>=|<|>|(?<![:<>!])=)")
ABOUT = re.compile(r"\\approx(?![A-Za-z])|\\simeq(?![A-Za-z])|\\doteq(?![A-Za-z])")
SIGN_CHOICE = re.compile(r"\\(?:pm|mp)(?![A-Za-z])|\+/-")
ARTICLES = re.compile(r"^(?:the|a|an)\s+")
NOT_WORDS = re.compile(r"\\text\s*|[{}$*`\"]|\\(?=[ ,;:!%&_#$])")
SPACE = re.compile(r"\s+")


def read(text: str) -> Answer:
    """Parse the whole `text` as an answer."""
    return read_clean(clean(text))


@lru_cache(maxsize=256)
def read_clean(text: str, depth: int = 0) -> Answer:
    if PLAIN.fullmatch(text):
        return Quantity(constant(Fraction(text), digits=text.isdigit(), decimal="." in text))
    if len(text) > LONGEST or (not text.isascii() and not set("€£¢").issuperset(c for c in text if not c.isascii())):
        return Words(words(text))
    try:
        return read_kind(text, depth)
    except (ValueError, ArithmeticError):
        return Words(words(text))


def words(text: str) -> str:
    """`text` casefolded, without articles, fonts and punctuation at the end."""
    plain = SPACE.sub(" ", NOT_WORDS.sub("", text)).strip().rstrip("!.").casefold()
    return ARTICLES.sub("", plain)


def read_kind(text: str, depth: int) -> Answer:
    """Parse an answer that is not words. Raises ValueError for words."""
    if depth > DEEPEST:
        raise Unreadable(f"an answer has at most {DEEPEST} levels")
    folded = words(text)
    if text in NO_SOLUTION or folded in NO_SOLUTION:
        return EMPTY
    if text in REALS or folded in REALS:
        return Several("()", (read_clean(r"-\infty", depth + 1), read_clean(r"\infty", depth + 1)))
    if number := in_base(text):
        return number
    if ratio := read_ratio(text):
        return ratio
    if matrix := MATRIX.fullmatch(BRACKETED_MATRIX.sub(r"\1", text)):
        return read_matrix(matrix[1], matrix[2], depth)
    if found := read_range(text, lambda part: read_clean(part.strip(), depth + 1)):
        return found
    if member := MEMBER.match(text):
        inner = read_clean(text[member.end() :].strip(), depth + 1)
        if isinstance(inner, Several) and inner.brackets:
            return inner
        raise Unreadable("what a symbol is in must be a set or an interval")
    text = unturned(text)
    if r"\cup" in text and len(parts := split(text, re.compile(r"\\cup(?![A-Za-z])"))) > 1:
        return Several("∪", tuple(read_item(part, depth) for part in parts))
    if several := read_list(text, depth) or read_brackets(text, depth):
        return several
    if RELATION.search(text) or ABOUT.search(text):
        return read_relation(text, depth)
    if SIGN_CHOICE.search(text):
        return read_both_signs(text, depth)
    if LETTERS.fullmatch(text):
        raise Unreadable("three letters are a word")
    return read_quantity(text)


def read_item(text: str, depth: int) -> Answer:
    """Parse a part of an answer. Raises Unreadable for an empty part or prose."""
    if not text.strip():
        raise Unreadable("an answer has an empty part")
    item = read_clean(text.strip(), depth + 1)
    if isinstance(item, Words) and (len(PROSE.findall(item.text)) > 2 or re.search(r"\d", item.text)):
        raise Unreadable("an answer's part is a sentence")
    return item


def is_prose(text: str) -> bool:
    return len(PROSE.findall(text)) > 4 or bool(CLAUSE.search(text))


def in_base(text: str) -> InBase | None:
    found = IN_BASE.fullmatch(text) or BASE_WORDS.fullmatch(text)
    if not found:
        return None
    named = next(group for group in found.groups()[1:] if group)
    base = BASES.get(named.lower(), 0) or (int(named) if named.isdigit() and len(named) < 3 else 0)
    if not 2 <= base <= 36 or any(int(digit, 36) >= base for digit in found[1]):
        raise Unreadable(f"{found[1]} is no number in base {named}")
    return InBase(found[1].upper().lstrip("0") or "0", base)


def read_ratio(text: str) -> Ratio | None:
    """Parse 3:2, 1:2:3 or "3 to 2"; a time of day is no ratio."""
    found = None if CLOCK.fullmatch(text) else RATIO.fullmatch(text)
    if not found:
        return None
    parts = tuple(Fraction(part) for part in (found[1].split(":") if found[1] else found.groups()[1:]))
    if not all(parts):
        raise Unreadable("a ratio has no part that is zero")
    return Ratio(parts)


def read_matrix(name: str, content: str, depth: int) -> Matrix:
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr", content) if row.strip()]
    if len(content) > LONGEST or not rows:
        raise Unreadable("a matrix has rows")
    cells = tuple(tuple(read_item(cell, depth) for cell in row.split("&")) for row in rows)
    brackets = {"vmatrix": "|", "Vmatrix": "‖"}.get(name, "")
    return Matrix(brackets, cells)


def split(text: str, at: re.Pattern[str]) -> list[str]:
    """Split `text` at the separators outside brackets."""
    parts, start, depth, outside = [], 0, 0, []
    for character in text:
        outside.append(depth == 0)
        if character in "([{":
            depth += 1
        elif character in ")]}":
            depth = max(depth - 1, 0)
    for found in at.finditer(text):
        if outside[found.start()]:
            parts.append(text[start : found.start()])
            start = found.end()
    return [*parts, text[start:]]


SEPARATOR = re.compile(rf",?\s*(?:{JOINS.pattern})|[,;]")


def read_list(text: str, depth: int) -> Several | None:
    """Parse a list: 1, 2, and 3. None without a separator."""
    parts = split(text, SEPARATOR)
    if len(parts) == 1:
        return None
    if len(parts) > MOST_ITEMS:
        raise Unreadable(f"a list has at most {MOST_ITEMS} parts")
    items = spread(read_item(part, depth) for part in parts)
    if len({isinstance(item, Words) for item in items}) > 1:
        raise Unreadable("a list has no words among its formulas")
    return Several("", items, either=len(split(text, OR)) > 1)


def spread(items: Iterable[Answer]) -> tuple[Answer, ...]:
    """Flatten nested lists: 1 \\pm 2, 5 gives three numbers."""
    found: list[Answer] = []
    for item in items:
        found += item.items if isinstance(item, Several) and item.brackets == "" else [item]
    return tuple(found)


OPENING = (("(", ")"), ("[", "]"), (r"\{", r"\}"), ("{", "}"), (r"\langle", r"\rangle"))


def read_brackets(text: str, depth: int) -> Several | None:
    """Parse a set, tuple or interval; None when the brackets only group."""
    opening = next((opened for opened, _ in OPENING if text.startswith(opened)), None)
    closing = next((closed for _, closed in OPENING if text.endswith(closed)), None)
    if text.endswith(r"\}"):
        closing = r"\}"
    if opening is None or closing is None or len(text) < len(opening) + len(closing):
        return None
    if not encloses(text):
        return None
    inner = text[len(opening) : -len(closing)].strip()
    kind = opening.removeprefix("\\") + closing.removeprefix("\\")
    items = split(inner, re.compile("[,;]"))
    if kind == "{}" and (opening == r"\{" or len(items) > 1):
        return Several("{}", spread(read_item(item, depth) for item in items)) if inner else EMPTY
    if len(items) == 1:
        return None
    if len(items) > MOST_ITEMS or kind not in ("()", "[]", "(]", "[)", "langlerangle"):
        raise Unreadable("brackets must match")
    return Several(kind, tuple(read_item(item, depth) for item in items))


def encloses(text: str) -> bool:
    """Whether the bracket at the start closes at the end."""
    depth = 0
    for i, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0 and i and i < len(text) - 1 and character in ")]}":
            return False
    return depth == 0


CONDITION = re.compile(r"^\\?(?:Pr?|E)\s*(?:\([^()]*\)|\[[^][]*\])\s*=")  # P(X = 2) =: its own signs relate no answer


def read_relation(text: str, depth: int) -> Answer:
    text = CONDITION.sub("P(A)=", text)
    if ABOUT.search(text):
        exact, _, about = (part.strip() for part in partition(text, ABOUT))
        if ABOUT.search(about):
            raise Unreadable("an answer is given once")
        read_exact = read_clean(exact, depth + 1) if exact else None
        if (isinstance(read_exact, Quantity) and not read_exact.formula.names) or isinstance(read_exact, Equation):
            return read_exact
        text = f"{exact}={about}"
    pieces = RELATION.split(text)
    sides, signs = [piece.strip() for piece in pieces[::2]], pieces[1::2]
    if not sides[0] and signs[0] == "=":
        sides, signs = sides[1:], signs[1:]
        if not signs:
            return read_item(sides[0], depth)
        text = text.partition("=")[2]
    if len(split(text, RELATION)) != len(sides) or not all(sides):
        raise Unreadable("a relation has two sides")
    if all(sign == "=" for sign in signs):
        return read_equation(sides, depth)
    return read_inequality(sides, signs, depth)


def partition(text: str, at: re.Pattern[str]) -> tuple[str, str, str]:
    found = at.search(text)
    return (text[: found.start()], found[0], text[found.end() :]) if found else (text, "", "")


PROSE = re.compile(r"(?<![A-Za-z\\])[A-Za-z]{2,}")
CLAUSE = re.compile(
    r"(?<![A-Za-z\\])(?:is|are|was|we|get|gets|have|has|so|therefore|thus|hence|because|then|not)(?![A-Za-z])", re.I
)
CALL = re.compile(  # f(2), P(A), f^{-1}(3)
    r"(?!\\?(?:sqrt|ln|lg|log|exp|abs)(?![A-Za-z]))[A-Za-z]+(?:_\{?\w+\}?)?'*(?:\^\s*\{?\s*-1\s*\}?)?\s*\([^()]*\)"
)
NAMING = re.compile(  # x, x_1, AB, \lambda', |AB|, |z|, \sin A
    r"(?:\\[A-Za-z]+|[A-Z]+|[a-z])(?:_\{?\w+\}?)?'*$|\|\s*(?:[A-Z]+|[zw])(?:_\{?\w+\}?)?\s*\|$"
    r"|\\?(?:arc)?(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])"
)
UNSOLVED = re.compile(r"^\s*[-+]|\\?(?:sqrt|ln|lg|log|exp)(?![A-Za-z])|!")
NAME_ARGUMENT = re.compile(r"(?<=[A-Za-z'])\s*\([^()]*\)|_\s*(?:\{[^{}]*\}|\w)|\^\s*\{?\s*-1\s*\}?")


def read_equation(sides: list[str], depth: int) -> Equation:
    """Parse left = ... = right. Numbers in a chain must be equal: 5 = 6 is not an answer."""
    if len(sides) > 8:
        raise Unreadable("an equation has at most 8 sides")
    formulas = [as_formula(side) for side in sides]
    if is_prose(sides[0]):
        raise Unreadable("a sentence is no side of an equation")
    numbers = [formula for formula in formulas if formula and not formula.names]
    if any(not same_values(numbers[0], formula) for formula in numbers[1:]):
        raise Unreadable("the sides of an equation must be equal")
    if len(sides) == 2 and formulas[0] and not formulas[0].names and is_name(sides[1]):
        sides, formulas = sides[::-1], formulas[::-1]  # 5 = x
    constant_left = formulas[0] is not None and not formulas[0].names
    name = sides[0].replace(" ", "") if constant_left or is_name(sides[0]) else ""
    if formulas[0] is None and not name:
        raise Unreadable("the left side of an equation must be a name or a formula")
    return Equation("" if constant_left else name, formulas[0], read_clean(sides[-1], depth + 1))


def as_formula(text: str) -> Formula | None:
    try:
        return read_formula(text)
    except (ValueError, ArithmeticError):
        return None


def is_name(text: str) -> bool:
    """Whether the text names a value: not a sentence, digits only in subscripts or function arguments.

    A formula of one symbol is still to be solved (-x, \\sqrt{x}, x!); one of several may be what is asked for (a+b).
    """
    if CALL.fullmatch(text) and not is_prose(text):
        return True
    if is_prose(text) or any(character.isdigit() for character in NAME_ARGUMENT.sub("", text)):
        return False
    formula = as_formula(text)
    if formula is None or NAMING.match(text):
        return True
    return len(formula.names) > 1 and not UNSOLVED.search(text)


def read_inequality(sides: list[str], signs: list[str], depth: int) -> Inequality:
    """Parse the range of one symbol: a < x <= b, x > a, a < x."""
    less = {"<", "<=", r"\le"}
    if any(sign == "=" for sign in signs) or len({sign in less for sign in signs}) > 1:
        raise Unreadable("an inequality goes one way")
    if signs[0] not in less:
        sides, signs = sides[::-1], signs[::-1]
    strict = [sign in ("<", ">") for sign in signs]
    if len(sides) == 3:
        low, name, high = sides
    elif len(sides) == 2 and is_symbol(sides[0]):
        low, name, high, strict = r"-\infty", sides[0], sides[1], [True, strict[0]]
    elif len(sides) == 2:
        low, name, high, strict = sides[0], sides[1], r"\infty", [strict[0], True]
    else:
        raise Unreadable("an inequality has two or three sides")
    if not is_symbol(name):
        raise Unreadable("an inequality is about one symbol")
    brackets = ("(" if strict[0] else "[") + (")" if strict[1] else "]")
    return Inequality(name, Several(brackets, (read_item(low, depth), read_item(high, depth))))


def is_symbol(text: str) -> bool:
    return bool(re.fullmatch(r"\\?[A-Za-z]+(?:_\{?\w\}?)?", text)) and (
        len(text) == 1 or text[0] == "\\" or "_" in text
    )


def read_both_signs(text: str, depth: int) -> Several:
    """Parse 1 \\pm 2 as the list of 3 and -1; \\mp swaps the signs."""
    upper = SIGN_CHOICE.sub(lambda found: "-" if found[0] == r"\mp" else "+", text)
    lower = SIGN_CHOICE.sub(lambda found: "+" if found[0] == r"\mp" else "-", text)
    pair = tuple(read_item(part, depth) for part in (upper, lower))
    if any(isinstance(part, Words) for part in pair):
        raise Unreadable("both signs must give an answer")
    return Several("", tuple(as_given(part) for part in pair))


def as_given(part: Answer) -> Answer:
    """The part without its mark as unevaluated: 3 + 1 from 3 \\pm 1 is the meaning of the sign."""
    if isinstance(part, Quantity) and part.formula.unevaluated:
        return replace(part, formula=replace(part.formula, unevaluated=False))
    return part
