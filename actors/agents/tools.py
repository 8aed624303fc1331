"""The agent of workflow.function = "tools": the model calls functions until it answers without a call."""

import ast
import asyncio
import inspect
import json
import operator
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actors.agents.model import ConversationFull, EndpointModel, Message
from actors.agents.scoring import AnswerScore, with_counts
from actors.rewards.protocol import RewardFunction
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described, valid

Tool = Callable[..., Any]
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
RESULT_CHARACTERS = 10_000  # a longer result is cut


class ToolCalls:
    """Up to `max_turns` answers; each that calls tools is followed by their results. The last one counts."""

    def __init__(self, reward_fn: RewardFunction, tools: Sequence[Tool], *, max_turns: int = 4) -> None:
        """Raises ConfigError for a tool that cannot be described."""
        if max_turns < 1:
            raise ConfigError(f"workflow.arguments.max_turns must be at least 1: it is {max_turns}")
        self._score, self._max_turns = AnswerScore(reward_fn), max_turns
        self._schemas = [schema(tool) for tool in tools]
        names = [one["function"]["name"] for one in self._schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"workflow.arguments.tools must have different names: {twice[0]!r} occurs twice")
        self._tools = dict(zip(names, tools, strict=True))

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        model, messages = EndpointModel(base_url, api_key), list(row["messages"])
        n_calls = n_failed = 0
        answer = model.answer(messages, self._schemas)
        for _ in range(self._max_turns - 1):
            calls = answer.get("tool_calls") or []
            if not calls:
                break
            results = [self._result(call["function"]) for call in calls]
            n_calls, n_failed = n_calls + len(calls), n_failed + sum(not is_right for _, is_right in results)
            messages.append(answer)
            for call, (text, _) in zip(calls, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": text})
            try:
                answer = model.answer(messages, self._schemas)
            except ConversationFull:
                break
        score = self._score(messages, answer, row)
        return with_counts(score, n_tool_calls=n_calls, n_failed_calls=n_failed)

    def _result(self, function: Mapping[str, str]) -> tuple[str, bool]:
        """The result of a call as text, and whether it succeeded. The model reads what was wrong."""
        tool = self._tools.get(function["name"])
        if tool is None:
            return f"error: there is no tool {function['name']!r}: the tools are {', '.join(self._tools)}", False
        try:
            given = json.loads(function["arguments"])
            inspect.signature(tool).bind(**given)
            result = tool(**given)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # noqa: BLE001  a tool raises any error on what the model wrote
            return f"error: {described(error, RESULT_CHARACTERS)}", False
        return valid(text[:RESULT_CHARACTERS]), True


def schema(tool: Tool) -> Message:
    """The tool in OpenAI's form, from its signature and docstring. Raises ConfigError."""
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():  # also a lambda
        raise ConfigError(f"a tool must be a function with a name: {tool!r} is not")
    try:
        parameters, hints = inspect.signature(tool).parameters, typing.get_type_hints(tool)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"a tool must have a signature: {name}: {error}") from error
    properties = {}
    for parameter in parameters.values():
        kind = TYPES.get(hints.get(parameter.name, str))
        if kind is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"a parameter of a tool must be of type str, int, float or bool: {parameter} of {name} is not"
            )
        properties[parameter.name] = {"type": kind}
    needed = [one.name for one in parameters.values() if one.default is one.empty]
    described = {"type": "object", "properties": properties, "required": needed}
    function = {"name": name, "description": inspect.getdoc(tool) or "", "parameters": described}
    return {"type": "function", "function": function}


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
