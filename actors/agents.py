"""Built-in agents ("multi_turn", "tools") in worker processes, as a user's agent.

Each answer is a request to the endpoint; the run's own reward scores the last one. Begin with `load_builtin`.
"""

import ast
import asyncio
import difflib
import inspect
import json
import operator
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any

from actors.mcp_server import McpFailed, McpServer
from actors.rewards.binding.values import read_value
from actors.rewards.loading import load_reward
from actors.rewards.protocol import RewardFunction
from actors.runtime.user_code import describe, load_function, user_folder
from areal_bus.errors import ConfigError
from areal_bus.foreign_text import described, valid
from areal_bus.messages import MAX_PARTS

Message = dict[str, Any]
TOO_LONG = "context_length_exceeded"  # code of a refusal


class ConversationFull(Exception):
    """The conversation is as long as it may be: it ends with the answer before."""


class EndpointRefused(Exception):
    """The endpoint refused a call; the text has the reason."""


class EndpointModel:
    """Answers of one conversation."""

    def __init__(self, base_url: str, api_key: str) -> None:
        self._url = f"{base_url}/chat/completions"
        self._headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}

    def answer(self, messages: Sequence[Message], tools: Sequence[Message] = ()) -> Message:
        """The assistant's message. Raises ConversationFull, EndpointRefused."""
        body = {"model": "any", "messages": list(messages), "tools": list(tools) or None}
        request = urllib.request.Request(self._url, json.dumps(body).encode(), self._headers)
        try:
            with urllib.request.urlopen(request) as response:
                message: Message = json.load(response)["choices"][0]["message"]
        except urllib.error.HTTPError as error:
            refusal = json.load(error)["error"]
            raise (ConversationFull if refusal["code"] == TOO_LONG else EndpointRefused)(refusal["message"]) from None
        return message | {"content": message["content"] or ""}


class AnswerScore:
    """The score of one answer, as fields for the reward function "agent"."""

    def __init__(self, function: RewardFunction) -> None:
        self._function = function

    def __call__(self, messages: list[Message], answer: Message, row: Mapping[str, Any]) -> dict[str, Any]:
        """reward, correct and parts. An exception of the function is a `reward_error`, which gives no reward (I10)."""
        prompt = "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)
        try:
            return read_value(self._function(prompt, answer["content"], row))
        except Exception as error:  # noqa: BLE001  the user's function raises any error
            return {"reward_error": f"workflow.arguments.reward_fn: {describe(error)}"}


def is_right(score: Mapping[str, Any]) -> bool:
    """By `correct`, or for a function without it by a reward of at least 1."""
    correct = score.get("correct")
    return score["reward"] >= 1 if correct is None else bool(correct)


def with_counts(score: Mapping[str, Any], **counts: int) -> dict[str, Any]:
    """The score with counts among its parts, which are MAX_PARTS at most."""
    parts = {**counts, **{name: part for name, part in score.get("parts", {}).items() if name not in counts}}
    return {**score, "parts": dict(list(parts.items())[:MAX_PARTS])}


RETRY = "Your answer is wrong. Please try again."


class MultiTurn:
    """Up to `max_turns` answers to one question; the last one counts."""

    def __init__(
        self, reward_fn: RewardFunction, *, max_turns: int = 2, discount: float = 1.0, retry: str = RETRY
    ) -> None:
        """`discount`: of the reward, for each answer after the first. `retry`: the message after a wrong one."""
        if max_turns < 1:
            raise ConfigError(f"workflow.arguments.max_turns must be at least 1: it is {max_turns}")
        try:
            list(Formatter().parse(retry))
        except ValueError as error:
            raise ConfigError(f"workflow.arguments.retry must be a template: {retry!r}: {error}") from error
        self._score, self._max_turns, self._discount, self._retry = AnswerScore(reward_fn), max_turns, discount, retry

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        model, messages = EndpointModel(base_url, api_key), list(row["messages"])
        answer = model.answer(messages)
        for turn in range(1, self._max_turns + 1):
            score = self._score(messages, answer, row)
            if "reward_error" in score or is_right(score) or turn == self._max_turns:
                break
            messages += [answer, {"role": "user", "content": self._retry.format_map(row)}]
            try:
                answer = model.answer(messages)
            except ConversationFull:
                break
        if "reward" in score:
            score["reward"] *= self._discount ** (turn - 1)
        return with_counts(score, n_turns=turn)


Tool = Callable[..., Any]
TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
RESULT_CHARACTERS = 10_000  # a longer result is cut


class ToolCalls:
    """Up to `max_turns` answers; each that calls tools is followed by their results. The last one counts."""

    def __init__(
        self, reward_fn: RewardFunction, tools: Sequence[Tool] = (), *, mcp: str = "", max_turns: int = 4
    ) -> None:
        """`mcp`: commands of MCP servers, one a line, run in the config's folder. Raises ConfigError for a bad one."""
        if max_turns < 1:
            raise ConfigError(f"workflow.arguments.max_turns must be at least 1: it is {max_turns}")
        self._score, self._max_turns = AnswerScore(reward_fn), max_turns
        commands = [line.strip() for line in mcp.splitlines() if line.strip()]
        offered = [(command, tool) for command in commands for tool in tools_of(command)]
        self._of_server = {tool["function"]["name"]: command for command, tool in offered}
        self._schemas = [*map(schema, tools), *(tool for _, tool in offered)]
        if not self._schemas:
            raise ConfigError("missing tools: set workflow.arguments.tools or workflow.arguments.mcp")
        names = [one["function"]["name"] for one in self._schemas]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ConfigError(f"workflow.arguments.tools and mcp must have different names: {twice[0]!r} occurs twice")
        self._tools = dict(zip(names, tools, strict=False))
        self._servers: dict[str, McpServer] = {}  # those of the episode, by command

    def __call__(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
        try:
            return self._converse(row, base_url, api_key)
        finally:
            for server in self._servers.values():
                server.close()
            self._servers.clear()

    def _converse(self, row: Mapping[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
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
        name = function["name"]
        tool = self._tools.get(name)
        if tool is None and name not in self._of_server:
            known = ", ".join([*self._tools, *self._of_server])
            return f"error: there is no tool {name!r}: the tools are {known}", False
        try:
            given = json.loads(function["arguments"])
            if tool is None:
                return self._of_mcp(name, given)
            inspect.signature(tool).bind(**given)
            result = tool(**given)
            if inspect.iscoroutine(result):
                result = asyncio.run(result)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
        except Exception as error:  # noqa: BLE001  a tool raises any error on what the model wrote
            return f"error: {described(error, RESULT_CHARACTERS)}", False
        return valid(text[:RESULT_CHARACTERS]), True

    def _of_mcp(self, name: str, given: Any) -> tuple[str, bool]:
        """The result of a server's tool. One that failed is started anew by the next call; McpFailed if it cannot."""
        command = self._of_server[name]
        if command not in self._servers:
            self._servers[command] = McpServer(command, user_folder())
        try:
            text, is_right = self._servers[command].call(name, given)
        except McpFailed:
            del self._servers[command]
            raise
        return valid(("" if is_right else "error: ") + text[:RESULT_CHARACTERS]), is_right


def tools_of(command: str) -> list[Message]:
    """The tools of an MCP server. Raises ConfigError."""
    try:
        server = McpServer(command, user_folder())
        try:
            return server.tools()
        finally:
            server.close()
    except McpFailed as error:
        raise ConfigError(f"workflow.arguments.mcp: {error}") from None


def schema(tool: Tool) -> Message:
    """The tool in OpenAI's form, from its signature and docstring. Raises ConfigError."""
    name = getattr(tool, "__name__", "")
    if not name.isidentifier():  # also a lambda
        raise ConfigError(f"invalid tool {tool!r}: it must be a function with a name")
    try:
        parameters, hints = inspect.signature(tool).parameters, typing.get_type_hints(tool)
    except (TypeError, ValueError, NameError) as error:
        raise ConfigError(f"unreadable signature of the tool {name}: {error}") from error
    properties = {}
    for parameter in parameters.values():
        kind = TYPES.get(hints.get(parameter.name, str))
        if kind is None or parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise ConfigError(
                f"unsupported parameter {parameter} of the tool {name}: its type must be str, int, float or bool"
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


Agent = Callable[[Mapping[str, Any], str, str], Any]
AGENTS: Mapping[str, Callable[..., Agent]] = {"multi_turn": MultiTurn, "tools": ToolCalls}
ITSELF = "agent"  # the reward function that reads what an agent returned
TOOLS: Mapping[str, Tool] = {"calculator": calculator}


def load_builtin(order: Mapping[str, Any]) -> Agent:
    """The agent `name` with its `arguments`; `reward`: the options of reward functions, `folder`: of the config.

    Raises ConfigError.
    """
    name, given = order["name"], dict(order["arguments"])
    made = AGENTS[name]
    check(name, given, made)
    if given["reward_fn"] == ITSELF:
        raise ConfigError(f"workflow.arguments.reward_fn must score an answer: {ITSELF!r} is what {name!r} returns")
    try:
        reward_fn = load_reward(given.pop("reward_fn"), Path(order["folder"]), options=order["reward"])
    except ConfigError as error:
        raise ConfigError(str(error).replace("reward.function", "workflow.arguments.reward_fn", 1)) from error
    if "tools" in given:
        given["tools"] = [find_tool(one.strip()) for one in given["tools"].split(",")]
    return made(reward_fn, **given)


def check(name: str, given: Mapping[str, Any], made: Callable[..., Any]) -> None:
    """Raises ConfigError for arguments that the agent does not take, lacks, or takes as another type."""
    parameters = inspect.signature(made).parameters
    for argument, value in given.items():
        if argument not in parameters:
            near = difflib.get_close_matches(argument, parameters, 1, 0.5)
            hint = f"the nearest is {near[0]}" if near else f"it takes {', '.join(parameters)}"
            raise ConfigError(f"workflow.function = {name!r} takes no argument {argument}: {hint}")
        default = parameters[argument].default
        kinds: tuple[type, ...] = (str,) if default in (inspect.Parameter.empty, ()) else (type(default),)
        kinds = (*kinds, int) if float in kinds else kinds
        if not isinstance(value, kinds) or isinstance(value, bool):
            words = {str: "a text", int: "a whole number", float: "a number"}[kinds[0]]
            raise ConfigError(f"workflow.arguments.{argument} of {name!r} must be {words}: it is {value!r}")
    for argument, parameter in parameters.items():
        if parameter.default is parameter.empty and argument not in given:
            raise ConfigError(f"workflow.function = {name!r} needs {argument}: set workflow.arguments.{argument}")


def find_tool(name: str) -> Tool:
    """A built-in tool, or "module:function" from the config's folder. Raises ConfigError."""
    if name in TOOLS:
        return TOOLS[name]
    module_name, colon, function = name.partition(":")
    if not (module_name and colon and function):
        raise ConfigError(
            f'workflow.arguments.tools must list {", ".join(TOOLS)} or "module:function", with commas: it has {name!r}'
        )
    return load_function("workflow.arguments.tools", name)
