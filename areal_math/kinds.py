"""The kinds of answers, as records."""

from dataclasses import dataclass
from fractions import Fraction

from areal_math.expressions import Formula


@dataclass(frozen=True, slots=True)
class Words:
    text: str  # casefolded, without articles, fonts and punctuation


@dataclass(frozen=True, slots=True)
class Quantity:
    """A formula with its unit, percent sign or price."""

    formula: Formula
    unit: str = ""
    percent: bool = False


@dataclass(frozen=True, slots=True)
class InBase:
    digits: str
    base: int


@dataclass(frozen=True, slots=True)
class Ratio:
    """a:b or a:b:c; the parts are positive."""

    parts: tuple[Fraction, ...]


@dataclass(frozen=True, slots=True)
class Several:
    """`brackets` is "" for a list, "{}" for a set, "()", "[)", ... for pairs, tuples and intervals, "∪" for a union."""

    brackets: str
    items: "tuple[Answer, ...]"
    either: bool = False  # a list with "or"


@dataclass(frozen=True, slots=True)
class Matrix:
    brackets: str
    rows: "tuple[tuple[Answer, ...], ...]"


@dataclass(frozen=True, slots=True)
class Equation:
    """left = right. `name` is the left side if it only names the value: x, f(2), AB, Area."""

    name: str
    left: Formula | None
    right: "Answer"


@dataclass(frozen=True, slots=True)
class Inequality:
    """A symbol's range, as an interval."""

    name: str
    interval: Several


Answer = Words | Quantity | InBase | Ratio | Several | Matrix | Equation | Inequality
