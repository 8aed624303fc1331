"""The built-in tool "calculator": arithmetic on numbers, without eval."""

import ast
import operator
from collections.abc import Callable
from typing import Any

MAX_CHARACTERS = 200
MAX_EXPONENT = 64
MAX_BITS = 4096  # of a whole number
BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


def calculator(expression: str) -> str:
    """The value of an arithmetic expression with + - * / // % ** and parentheses."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"an expression has at most {MAX_CHARACTERS} characters: it has {len(expression)}")
    value = _value(ast.parse(expression.strip(), mode="eval").body)
    return str(int(value)) if isinstance(value, float) and value.is_integer() and abs(value) < 1e15 else str(value)


def _value(node: ast.expr) -> int | float:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)
    if isinstance(node, ast.UnaryOp) and type(node.op) in UNARY:
        return _bounded(UNARY[type(node.op)](_value(node.operand)))
    if isinstance(node, ast.BinOp) and type(node.op) in BINARY:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
            raise ValueError(f"an exponent is at most {MAX_EXPONENT}: it is {right}")
        return _bounded(BINARY[type(node.op)](left, right))
    raise ValueError(f"only numbers and + - * / // % ** are allowed: {ast.unparse(node)!r} is not")


def _bounded(value: Any) -> int | float:
    if isinstance(value, int) and value.bit_length() <= MAX_BITS:
        return value
    if isinstance(value, float) and abs(value) < float("inf"):
        return value
    raise ValueError("the result must be a finite real number that is not too large")
