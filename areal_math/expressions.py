r"""Formulas, compared by evaluating them at fixed points (polynomial identity testing: Schwartz, JACM 1980).

Evaluation is bounded: exponents are checked before a computation, and no number exceeds `LARGEST_BITS`. Rational
arithmetic is exact. Some points assign negative values to symbols, so that `\sqrt{x^2}` differs from `x`.
"""

import cmath
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

LARGEST_BITS: Final = 20_000  # of a numerator or denominator
LARGEST_TEN: Final = 1000  # exponent of scientific notation
N_POINTS: Final = 5
MOST_FACTORS: Final = 10  # of a binomial coefficient of symbols, as a polynomial
CLOSE: Final = 1e-11  # relative tolerance for values that are not fractions

Value = Fraction | complex


class Unreadable(ValueError):
    """The text is not a supported formula, or it exceeds a limit."""


@dataclass(frozen=True, slots=True)
class Formula:
    """A parsed formula. `value(point)` raises Unreadable or ArithmeticError where it is undefined."""

    value: Callable[[int], Value]
    literal: Fraction | None = None  # its value if it is a written number: 5, -1/3, 2.5, 1 1/2, 3e4
    digits: bool = False  # digits only: it may be the whole part of 3 1/2
    decimal: bool = False
    names: frozenset[str] = frozenset()  # its symbols
    unevaluated: bool = False  # it has parts left to compute: 2+2, 10!, \sqrt{16}
    composite: bool = False  # more than one number or constant


def value_of(name: str, point: int) -> Fraction:
    """A symbol's value in [-2, 2], never 0: positive at point 0, negative at point 1, mixed at the others."""
    drawn = zlib.crc32(f"{name}/{point}".encode())
    size = Fraction(drawn % 991 + 5, 499)
    return -size if point == 1 or (point > 1 and drawn & 4096) else size


def bounded(value: Value) -> Value:
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > LARGEST_BITS:
            raise Unreadable(f"a number has at most {LARGEST_BITS} bits")
    elif not cmath.isfinite(value):
        raise Unreadable("a value must be finite")
    return value


def constant(value: Fraction, *, digits: bool = False, decimal: bool = False) -> Formula:
    bounded(value)
    return Formula(lambda point: value, literal=value, digits=digits, decimal=decimal)


def mixed(whole: Formula, part: Formula) -> Formula:
    """A mixed number (3 1/2) from a whole number and a proper fraction; else the product."""
    if whole.literal is None or part.literal is None or not 0 < part.literal < 1 or part.decimal:
        return multiply(whole, part)
    return constant(whole.literal + part.literal)


def join(one: Formula, other: Formula, value: Callable[[int], Value], *, unevaluated: bool) -> Formula:
    return Formula(
        lambda point: bounded(value(point)),
        names=one.names | other.names,
        unevaluated=one.unevaluated or other.unevaluated or unevaluated,
        composite=True,
    )


def both_numbers(one: Formula, other: Formula) -> bool:
    return one.literal is not None and other.literal is not None


def add(one: Formula, other: Formula) -> Formula:
    return join(one, other, lambda p: plus(one.value(p), other.value(p)), unevaluated=both_numbers(one, other))


def plus(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one + other
    return complex(one) + complex(other)


def times(one: Value, other: Value) -> Value:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one * other
    return complex(one) * complex(other)


def negative(one: Formula) -> Formula:
    if one.literal is not None:
        return constant(-one.literal, decimal=one.decimal)
    return Formula(
        lambda p: times(Fraction(-1), one.value(p)), None, False, False, one.names, one.unevaluated, one.composite
    )


def multiply(one: Formula, other: Formula) -> Formula:
    unevaluated = both_numbers(one, other) or (one.composite and other.composite and not (one.names | other.names))
    return join(one, other, lambda p: times(one.value(p), other.value(p)), unevaluated=unevaluated)


def divide(one: Formula, other: Formula) -> Formula:
    if one.literal is not None and other.literal is not None:
        if other.literal == 0:
            raise Unreadable("division by zero")
        found = one.literal / other.literal
        whole = one.literal.denominator == other.literal.denominator == 1 and not (one.decimal or other.decimal)
        if whole and (found.denominator > 1 or abs(other.literal) == 1 or found == 0):
            return constant(found)
        return join(one, other, lambda p: found, unevaluated=True)

    def value(point: int) -> Value:
        over, under = one.value(point), other.value(point)
        if isinstance(over, Fraction) and isinstance(under, Fraction):
            return over / under
        return complex(over) / complex(under)

    return join(one, other, value, unevaluated=False)


def raise_to(base: Formula, exponent: Formula) -> Formula:
    if base.literal == 10 and base.digits and exponent.literal is not None and exponent.literal.denominator == 1:
        if abs(exponent.literal) > LARGEST_TEN:
            raise Unreadable(f"an exponent of ten is at most {LARGEST_TEN}")
        return constant(Fraction(10) ** int(exponent.literal))
    whole = exponent.literal is not None and exponent.literal.denominator == 1
    unevaluated = whole and not base.names and (base.literal is not None or base.composite)
    return join(base, exponent, lambda p: to_power(base.value(p), exponent.value(p)), unevaluated=unevaluated)


def to_power(base: Value, exponent: Value) -> Value:
    if isinstance(base, Fraction) and isinstance(exponent, Fraction) and exponent.denominator == 1:
        n_bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if n_bits * abs(exponent) <= LARGEST_BITS:
            return base ** int(exponent)
        if abs(base) != 1:
            raise Unreadable(f"a power has at most {LARGEST_BITS} bits")
        return base ** int(exponent % 2)
    return complex(base) ** complex(exponent)


def root(inner: Formula, index: Formula) -> Formula:
    if index.literal is None or index.literal.denominator != 1 or not 1 < index.literal < 100:
        raise Unreadable("the index of a root is a whole number from 2 to 99")
    n = int(index.literal)
    exact = exact_root(inner.literal, n) if inner.literal is not None else None
    if exact is not None:
        return join(inner, inner, lambda p: exact, unevaluated=True)
    found = join(inner, inner, lambda p: root_of(inner.value(p), n), unevaluated=False)
    return Formula(found.value, names=found.names, unevaluated=found.unevaluated, composite=inner.composite)


def root_of(value: Value, n: int) -> Value:
    """The real root if there is one, else the principal root."""
    if isinstance(value, Fraction) and (exact := exact_root(value, n)) is not None:
        return exact
    x = complex(value)
    if x.imag == 0 and (x.real >= 0 or n % 2):
        return complex(math.copysign(abs(x.real) ** (1 / n), x.real))
    return x ** (1 / n)


def exact_root(value: Fraction, n: int) -> Fraction | None:
    if value < 0 and n % 2 == 0:
        return None
    parts = []
    for whole in (abs(value.numerator), value.denominator):
        if whole.bit_length() > 900:
            return None
        near = round(whole ** (1 / n))
        part = next((k for k in (near - 1, near, near + 1) if k >= 0 and k**n == whole), None)
        if part is None and n == 2 and math.isqrt(whole) ** 2 == whole:
            part = math.isqrt(whole)
        if part is None:
            return None
        parts.append(part)
    return Fraction(parts[0], parts[1]) * (-1 if value < 0 else 1)


def factorial(one: Formula) -> Formula:
    def value(point: int) -> Value:
        n = one.value(point)
        if not isinstance(n, Fraction) or n.denominator != 1 or not 0 <= n <= 500:
            raise Unreadable("a factorial is of a whole number up to 500")
        return Fraction(math.factorial(int(n)))

    return join(one, one, value, unevaluated=not one.names)


def binomial(one: Formula, other: Formula) -> Formula:
    def value(point: int) -> Value:
        n, k = one.value(point), other.value(point)
        if not (isinstance(n, Fraction) and isinstance(k, Fraction) and k.denominator == 1):
            raise Unreadable("a binomial coefficient is of whole numbers")
        if one.names and not other.names and 0 <= k <= MOST_FACTORS:
            return math.prod((n - i for i in range(int(k))), start=Fraction(1)) / math.factorial(int(k))
        if n.denominator != 1:
            raise Unreadable("a binomial coefficient is of whole numbers")
        if not 0 <= k <= n <= 1000:
            raise Unreadable("a binomial coefficient is of whole numbers up to 1000")
        return Fraction(math.comb(int(n), int(k)))

    return join(one, other, value, unevaluated=not (one.names | other.names))


def apply(one: Formula, function: Callable[[complex], complex]) -> Formula:
    return join(one, one, lambda p: complex(function(complex(one.value(p)))), unevaluated=not one.names)


def real(x: complex) -> float:
    if x.imag:
        raise Unreadable("a value must be real")
    return x.real


def values(formula: Formula) -> list[Value | None]:
    """The value at each point; None where it is undefined."""
    found: list[Value | None] = []
    for point in range(N_POINTS if formula.names else 1):
        try:
            found.append(bounded(formula.value(point)))
        except (ArithmeticError, ValueError):
            found.append(None)
    return found


def close(one: Value, other: Value) -> bool:
    if isinstance(one, Fraction) and isinstance(other, Fraction):
        return one == other
    try:
        a, b = complex(one), complex(other)
    except OverflowError:
        return False
    largest = max(abs(a), abs(b))
    return abs(a - b) <= CLOSE * (largest if one and other else 1)


def same_values(one: Formula, other: Formula) -> bool:
    """Whether both are defined at the same points (at least one) and equal there."""
    if one.names != other.names:
        return False
    pairs = list(zip(values(one), values(other), strict=True))
    defined = [(a, b) for a, b in pairs if a is not None and b is not None]
    return bool(defined) and all((a is None) == (b is None) for a, b in pairs) and all(close(a, b) for a, b in defined)


def equal(gold: Formula, given: Formula) -> bool:
    """Whether the values are equal and `given` leaves nothing to compute that `gold` has evaluated."""
    if given.unevaluated and not gold.unevaluated:
        return False
    if gold.literal is not None and not gold.unevaluated:
        return given.literal == gold.literal
    if given.literal is not None and given.decimal and not isinstance(values(gold)[0], Fraction):
        return False  # an approximation
    return same_values(gold, given)
