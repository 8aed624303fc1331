r"""Parses LaTeX formulas by recursive descent. Length, digits, nesting and exponents are limited."""

import cmath
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Final

from areal_math.expressions import (
    LARGEST_TEN,
    Formula,
    Unreadable,
    add,
    apply,
    binomial,
    constant,
    divide,
    factorial,
    mixed,
    multiply,
    negative,
    raise_to,
    real,
    root,
    value_of,
)

LONGEST: Final = 1000  # characters of a formula
DEEPEST: Final = 16  # levels of brackets, braces and functions
MOST_DIGITS: Final = 500  # of one number
MOST_TOKENS: Final = 300

CONSTANTS: Mapping[str, complex] = {"pi": math.pi, "e": math.e, "i": 1j, r"\pi": math.pi, r"\imath": 1j}
FUNCTIONS: Mapping[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "ln": cmath.log,
    "exp": cmath.exp,
    "log": cmath.log10,
    "lg": cmath.log10,
    "cot": lambda x: 1 / cmath.tan(x),
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
}
INVERSES = ("sin", "cos", "tan")
TOKEN = re.compile(
    r"\s*(?:(?P<mixed>(\d+)\s+(\d+)\s*/\s*(\d+)(?![\d.]))"
    r"|(?P<science>(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+|\s*(?:\\times|\\cdot|\*|x(?=\s*10\s*\^))\s*10\s*\^\s*(?:\{\s*[+-]?\d+\s*\}|-?\d+)))"
    r"|(?P<repeating>\d*\.\d*\\(?:overline|bar)\s*\{\s*\d+\s*\})|(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\(?:[A-Za-z]+|[{}|]))|(?P<word>[A-Za-z]+)|(?P<sign>\*\*|[^\sA-Za-z\d\\]))"
)
EXPONENT = re.compile(r"(?:[eE]|10\s*\^\s*\{?\s*)([+-]?\d+)\s*\}?$")
GREEK = {
    *("alpha", "beta", "gamma", "delta", "epsilon", "varepsilon", "theta", "lambda", "mu", "nu", "rho", "sigma", "tau"),
    *("phi", "varphi", "omega", "psi", "chi", "eta", "zeta", "kappa", "xi", "ell", "Delta", "Omega", "Phi", "Sigma"),
    *("Gamma", "Theta", "Lambda", "infty", "Psi", "Pi", "Xi"),
}
NAME = re.compile(r"[A-Z]{2,}|[A-Za-z]")  # capitals side by side name one thing (XIV, ABC); others are factors
CLOSING = {"(": ")", "[": "]", "{": "}"}
MULTIPLY, DIVIDE = {"*", r"\times", r"\cdot"}, {"/", r"\div"}


@dataclass(frozen=True, slots=True)
class Token:
    kind: str  # mixed, science, repeating, number, command, word, sign, end
    text: str


def read_formula(text: str) -> Formula:
    """Parse the whole `text` as a formula. Raises Unreadable."""
    if len(text) > LONGEST:
        raise Unreadable(f"a formula has at most {LONGEST} characters")
    reader = Reader(tokens(text))
    formula = reader.sum(0)
    if reader.next.kind != "end":
        raise Unreadable(f"nothing may follow a formula: {reader.next.text}")
    return formula


def tokens(text: str) -> list[Token]:
    found, at, text = [], 0, text.strip()
    while at < len(text):
        match = TOKEN.match(text, at)
        if not match or not match[0].isascii():
            raise Unreadable(f"no part of a formula: {text[at : at + 10]!r}")
        kind = next(
            name for name in ("mixed", "science", "repeating", "number", "command", "word", "sign") if match[name]
        )
        if kind == "word" and len(match[kind]) > 3 and match[kind] not in FUNCTIONS and match[kind] != "sqrt":
            raise Unreadable(f"a word: {match[kind]}")
        if kind == "word" and match[kind] not in FUNCTIONS and match[kind] not in ("pi", "sqrt"):
            found += [Token("word", part) for part in NAME.findall(match[kind])]
        else:
            found.append(Token(kind, match[kind]))
        at = match.end()
        if len(found) > MOST_TOKENS:
            raise Unreadable(f"a formula has at most {MOST_TOKENS} tokens")
    return [*found, Token("end", "")]


class Reader:
    """Recursive-descent parser: sums of products of powers of atoms."""

    def __init__(self, found: list[Token]) -> None:
        self._tokens, self._at = found, 0

    @property
    def next(self) -> Token:
        return self._tokens[self._at]

    def take(self) -> Token:
        token = self.next
        self._at += token.kind != "end"
        return token

    def expect(self, text: str) -> None:
        if self.take().text != text:
            raise Unreadable(f"{text} is missing")

    def sum(self, depth: int) -> Formula:
        if depth > DEEPEST:
            raise Unreadable(f"a formula has at most {DEEPEST} levels")
        total = self.product(depth)
        while self.next.text in ("+", "-") and self.next.kind == "sign":
            if self.take().text == "+":
                total = add(total, self.product(depth))
            else:
                total = add(total, negative(self.product(depth)))
        return total

    def product(self, depth: int) -> Formula:
        sign = False
        while self.next.kind == "sign" and self.next.text in ("+", "-"):
            sign ^= self.take().text == "-"
        total = self.power(depth)
        if total.digits and self.next.text == r"\frac":
            total = mixed(total, self.power(depth))
        while True:
            if self.next.text in MULTIPLY:
                self.take()
                total = multiply(total, self.signed(depth))
            elif self.next.text in DIVIDE:
                self.take()
                total = divide(total, self.signed(depth))
            elif self.begins_factor():
                total = multiply(total, self.power(depth))
            else:
                return negative(total) if sign else total

    def signed(self, depth: int) -> Formula:
        if self.next.text == "-" and self.next.kind == "sign":
            self.take()
            return negative(self.power(depth))
        return self.power(depth)

    def begins_factor(self) -> bool:
        kind, text = self.next.kind, self.next.text
        if kind in ("number", "science", "mixed", "repeating"):
            return False  # "5 5" and "x2" are ambiguous
        return kind == "word" or (kind == "command" and text not in (r"\}", r"\|")) or text in ("(", "{", "[")

    def power(self, depth: int) -> Formula:
        base = self.atom(depth)
        if self.next.text == "!":
            self.take()
            base = factorial(base)
        if self.next.text in ("^", "**"):
            self.take()
            base = raise_to(base, self.argument(depth))
        if self.next.text in ("^", "**", "!"):
            raise Unreadable("a power of a power needs braces, a double factorial is not read")
        return base

    def argument(self, depth: int) -> Formula:
        """The argument of a command: a group in braces, or one token, of a number only one digit."""
        if self.next.text == "{":
            return self.group(depth)
        token = self.next
        if token.kind == "number" and len(token.text) > 1 and "." not in token.text:
            self._tokens[self._at] = Token("number", token.text[1:])
            return number(token.text[0])
        if token.text == "-":
            self.take()
            return negative(self.argument(depth))
        return self.atom(depth)

    def group(self, depth: int) -> Formula:
        closing = CLOSING[self.take().text]
        inner = self.sum(depth + 1)
        self.expect(closing)
        return replace(inner, digits=False)

    def atom(self, depth: int) -> Formula:
        if depth > DEEPEST:
            raise Unreadable(f"a formula has at most {DEEPEST} levels")
        if self.next.text in CLOSING and self.next.kind == "sign":
            return self.group(depth)
        token = self.take()
        if token.kind == "number":
            return number(token.text)
        if token.kind == "science":
            return scientific(token.text)
        if token.kind == "mixed":
            return mixed_number(token.text)
        if token.kind == "repeating":
            return repeating(token.text)
        if token.kind == "word" or token.kind == "command":
            return self.name(token.text.removeprefix("\\"), depth)
        if token.text == "|":
            inner = self.sum(depth + 1)
            self.expect("|")
            return apply(inner, abs)
        raise Unreadable(f"no part of a formula: {token.text or 'the end'}")

    def name(self, name: str, depth: int) -> Formula:
        if name == "frac":
            over = self.argument(depth + 1)
            return divide(over, self.argument(depth + 1))
        if name == "sqrt":
            return self.root(depth)
        if name == "binom":
            over = self.argument(depth + 1)
            return binomial(over, self.argument(depth + 1))
        if name in ("lfloor", "lceil"):
            inner = self.sum(depth + 1)
            self.expect(f"\\r{name[1:]}")
            return apply(inner, lambda x: complex((math.floor if name == "lfloor" else math.ceil)(real(x))))
        if name in FUNCTIONS:
            return self.function(name, depth)
        if name in CONSTANTS:
            return constant_named(name)
        if name in GREEK or NAME.fullmatch(name):
            return self.symbol(name)
        raise Unreadable(f"no part of a formula: {name}")

    def root(self, depth: int) -> Formula:
        index = number("2")
        if self.next.text == "[":
            index = self.group(depth + 1)
        return root(self.group(depth + 1) if self.next.text == "(" else self.argument(depth + 1), index)

    def function(self, name: str, depth: int) -> Formula:
        base = exponent = None
        if name == "log" and self.next.text == "_":
            self.take()
            base = self.argument(depth + 1)
        if self.next.text == "^":
            self.take()
            exponent = self.argument(depth + 1)
        if exponent and exponent.literal == -1 and name in INVERSES:
            name, exponent = f"arc{name}", None  # \\sin^{-1} x
        inner = self.group(depth + 1) if self.next.text in ("(", "{") else self.bare_argument(depth + 1)
        if name == "exp" and exponent is None:
            return raise_to(constant_named("e"), inner)
        found = apply(inner, FUNCTIONS["ln" if base else name])
        if base:
            found = divide(found, apply(base, cmath.log))
        return raise_to(found, exponent) if exponent else found

    def bare_argument(self, depth: int) -> Formula:
        """An argument without braces (\\sin 2x): the following product, up to the next function or sign."""
        total = self.power(depth)
        while self.next.text.removeprefix("\\") not in FUNCTIONS and self.next.text not in ("(", "[", "{"):
            if not self.begins_factor():
                break
            total = multiply(total, self.power(depth))
        return total

    def symbol(self, name: str) -> Formula:
        """A symbol with subscript and primes: x, x_1, x_{max}, x'."""
        if self.next.text == "_":
            self.take()
            part = self.take()
            parts = [part.text]
            if part.text == "{":
                while self.next.text != "}":
                    if self.next.kind == "end":
                        raise Unreadable("} is missing")
                    parts.append(self.take().text)
                self.take()
            name += "_" + "".join(parts).strip("{}")
        while self.next.text == "'":
            name += self.take().text
        return Formula(lambda point: value_of(name, point), names=frozenset((name,)))


def constant_named(name: str) -> Formula:
    value = CONSTANTS[name]
    return Formula(lambda point: value)


def number(text: str) -> Formula:
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"a number has at most {MOST_DIGITS} digits")
    return constant(Fraction(text.rstrip(".") or "0"), digits="." not in text, decimal="." in text)


def scientific(text: str) -> Formula:
    found = EXPONENT.search(text)
    mantissa = re.match(r"[\d.]+", text)
    if not found or not mantissa or len(found[1]) > 6 or abs(int(found[1])) > LARGEST_TEN:
        raise Unreadable(f"an exponent of ten is at most {LARGEST_TEN}")
    read = number(mantissa[0]).literal
    return constant((read or Fraction(0)) * Fraction(10) ** int(found[1]), decimal=True)


def repeating(text: str) -> Formula:
    r"""0.1\overline{6} is 1/6."""
    if len(text) > MOST_DIGITS:
        raise Unreadable(f"a number has at most {MOST_DIGITS} digits")
    whole, after, repeated = re.findall(r"^\d*|(?<=\.)\d*(?=\\)|\d+(?=\s*\}$)", text)
    period = Fraction(int(repeated), 10 ** len(repeated) - 1)
    return constant(int(whole or 0) + (int(after or 0) + period) / 10 ** len(after))


def mixed_number(text: str) -> Formula:
    whole, over, under = re.findall(r"\d+", text)
    return mixed(number(whole), divide(number(over), number(under)))
