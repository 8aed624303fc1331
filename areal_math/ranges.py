r"""Parses ranges of one symbol: x<1 or x>2, x>=0 and x<1, \{x | x>1\}, x \ne 3, \mathbb{R} \setminus \{3\}, ]0,1[."""

import itertools
import re
from collections.abc import Callable
from fractions import Fraction

from areal_math.expressions import Unreadable, Value, values
from areal_math.kinds import Answer, Inequality, Quantity, Several

Read = Callable[[str], Answer]  # a part of the answer

MOST_PARTS = 8
SYMBOL = r"(?:\\?[A-Za-z]+(?:_\{?\w\}?)?)"
IN_REALS = r"(?:\s*\\in\s*\\mathbb\s*\{?\s*R\s*\}?)"
BUILDER = re.compile(rf"\\\{{\s*({SYMBOL}){IN_REALS}?\s*(?:\||:)\s*(.+?)\s*\\\}}", re.DOTALL)
IN_REALS_FIRST = re.compile(rf"({SYMBOL}){IN_REALS}\s*,\s*(.+)", re.DOTALL)
EXCEPT = re.compile(
    r"\\text\s*\{\s*all real numbers(?: \w)?,? except(?: for)?\s*\}(.+)|all real numbers(?: \w)?,? except(?: for)?(.+)",
    re.IGNORECASE | re.DOTALL,
)
REALS_BELOW = re.compile(
    rf"(.+?)\s*,?\s*(?:\\text\s*\{{\s*(?:and|where|for)\s*\}})?\s*({SYMBOL}){IN_REALS}\s*", re.DOTALL
)
OR = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*or\s*\}|(?<![A-Za-z\\])or(?![A-Za-z]))")
AND = re.compile(r",?\s*(?:\\text\s*\{\s*,?\s*and\s*\}|(?<![A-Za-z\\])and(?![A-Za-z]))")
WITHOUT = re.compile(
    rf"(?:({SYMBOL})\s*\\ne(?![A-Za-z])|\\mathbb\s*\{{?\s*R\s*\}}?\s*(?:\\setminus|\\backslash|-))(.+)", re.DOTALL
)
TURNED = re.compile(r"([\[\]])\s*([^\[\]{}(),;]+)[,;]([^\[\]{}(),;]+)([\[\]])")  # ]0,1[ is (0,1)


def unturned(text: str) -> str:
    """Intervals with reversed brackets in the usual notation."""
    return TURNED.sub(
        lambda found: ("(" if found[1] == "]" else "[") + f"{found[2]},{found[3]}" + (")" if found[4] == "[" else "]"),
        text,
    )


def read_range(text: str, read: Read) -> Inequality | None:
    """None for a text of another form. Raises Unreadable for a range that is none, or of several symbols."""
    if found := BUILDER.fullmatch(text):
        inner = read(found[2])
        if not isinstance(inner, Inequality):
            raise Unreadable("a set is built by inequalities")
        return about(inner, found[1])
    if found := IN_REALS_FIRST.fullmatch(text):
        inner = read(found[2])
        return about(inner, found[1]) if isinstance(inner, Inequality) else None
    if found := REALS_BELOW.fullmatch(text):
        inner = read(found[1])
        return about(inner, found[2]) if isinstance(inner, Inequality) else None
    if found := WITHOUT.fullmatch(text):
        return left_out(found[1] or "x", found[2].strip(), read)
    if found := EXCEPT.fullmatch(text):
        return left_out("x", (found[1] or found[2]).strip(), read)
    if OR.search(text):
        return joined(parts_of(text, OR, read))
    return both(parts_of(text, AND, read)) if AND.search(text) else None


def about(inner: Inequality, name: str) -> Inequality:
    if inner.name != name:
        raise Unreadable("a range is about one symbol")
    return inner


def parts_of(text: str, at: re.Pattern[str], read: Read) -> list[Inequality] | None:
    """The inequalities between the separators; None if a part is none."""
    texts = at.split(text)
    if not 1 < len(texts) <= MOST_PARTS:
        return None
    parts = [read(part.strip()) for part in texts]
    inequalities = [part for part in parts if isinstance(part, Inequality)]
    if len(inequalities) < len(parts) or len({part.name for part in inequalities}) > 1:
        return None
    return inequalities


def joined(parts: list[Inequality] | None) -> Inequality | None:
    if parts is None:
        return None
    items = tuple(
        item for part in parts for item in (part.interval.items if part.interval.brackets == "∪" else (part.interval,))
    )
    return Inequality(parts[0].name, Several("∪", items))


def both(parts: list[Inequality] | None) -> Inequality | None:
    """A lower bound and an upper bound as one interval."""
    if parts is None or len(parts) != 2:
        return None
    lower = next((part.interval for part in parts if is_infinite(part.interval, 1)), None)
    upper = next((part.interval for part in parts if is_infinite(part.interval, 0)), None)
    if lower is None or upper is None:
        return None
    if lower is upper:
        return None
    return Inequality(parts[0].name, Several(lower.brackets[0] + upper.brackets[1], (lower.items[0], upper.items[1])))


def is_infinite(interval: Several, side: int) -> bool:
    """Whether the interval has no bound on this side (0: below, 1: above)."""
    if interval.brackets == "∪":
        return False
    bound = interval.items[side]
    return isinstance(bound, Quantity) and "infty" in bound.formula.names


def left_out(name: str, text: str, read: Read) -> Inequality:
    """All real numbers except the listed ones: 3, or -2, 3, or "-2 and x \\ne 3"."""
    found = read(re.sub(rf"{re.escape(name)}\s*\\ne(?![A-Za-z])", "", text))
    items = found.items if isinstance(found, Several) and found.brackets in ("", "{}") else (found,)
    points = sorted((real_value(item), at) for at, item in enumerate(items))
    if not 0 < len(points) <= MOST_PARTS or len({value for value, _ in points}) < len(points):
        raise Unreadable("different numbers are left out of the real numbers")
    ends = [read(r"-\infty"), *(items[at] for _, at in points), read(r"\infty")]
    return Inequality(name, Several("∪", tuple(Several("()", pair) for pair in itertools.pairwise(ends))))


def real_value(item: Answer) -> Fraction | float:
    if not isinstance(item, Quantity) or item.formula.names:
        raise Unreadable("only numbers are left out of the real numbers")
    value: Value | None = values(item.formula)[0]
    if isinstance(value, complex):
        if value.imag:
            raise Unreadable("only real numbers are left out of the real numbers")
        return value.real
    if value is None:
        raise Unreadable("only numbers are left out of the real numbers")
    return value
