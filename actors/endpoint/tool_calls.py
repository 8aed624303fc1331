"""Tool calls in an answer, in the form that the model's family writes them.

Each reader is linear in the text. An answer with a malformed call, or with more than MOST_CALLS of them, has no calls:
the agent then sees the model's text. Forms by name, as vLLM's tool parsers are called:

- hermes: <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen 2.5 and 3)
- llama3_json: {"name": ..., "parameters": {...}} as the whole answer, after <|python_tag|> or not (Llama 3.1 to 3.3)
- qwen3_xml: <tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call> (Qwen3-Coder)
- mistral: [TOOL_CALLS][{"name": ..., "arguments": {...}}], or [TOOL_CALLS]NAME[ARGS]{...} for each
- pythonic: [NAME(key=value, ...), ...] as the whole answer (Llama 4, Llama 3.2 small, ToolACE)
"""

import ast
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from areal_bus.foreign_text import valid_json

OPENING, CLOSING = "<tool_call>", "</tool_call>"
PYTHON_TAG, TOOL_CALLS, ARGS, END_OF_NAME = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", ("[CALL_ID]", "[ARGS]", "{")
SPECIAL_MARKS = {PYTHON_TAG, TOOL_CALLS, ARGS, "[CALL_ID]"}
MOST_CALLS = 128  # in one answer
MOST_PYTHON = 32_768  # characters that are parsed as Python

Tools = Sequence[Mapping[str, Any]]  # in OpenAI's form
Function = dict[str, str]  # name and arguments, the latter as JSON text

XML_FUNCTION = re.compile(r"\s*<function=([^<>\n]+)>(.*)</function>\s*", re.DOTALL)


class Malformed(Exception):
    """A call that its form does not have."""


def function_of(record: Any, *arguments: str) -> Function:
    """Name and arguments of a JSON object; `arguments`: the keys that may hold them. Raises Malformed."""
    if not isinstance(record, dict) or not isinstance(record.get("name"), str):
        raise Malformed
    held = [key for key in arguments if key in record]
    given = record[held[0]] if held else {}
    if len(held) > 1 or not isinstance(given, dict) or record.keys() - {"name", "id", "type", *arguments}:
        raise Malformed  # a key that is not known: the call would lose it
    return made(record["name"], given)


def made(name: str, arguments: Mapping[str, Any]) -> Function:
    """Raises Malformed for values that are no JSON: NaN, infinity, sets."""
    try:
        record = valid_json({"name": name, "arguments": dict(arguments)})
        return {"name": record["name"], "arguments": json.dumps(record["arguments"], allow_nan=False)}
    except (ValueError, TypeError, RecursionError):
        raise Malformed from None


def parsed(text: str) -> Any:
    """The JSON value. Raises Malformed."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Malformed from None


def blocks(text: str) -> Iterator[str]:
    """The text from each opening tag to the next closing one."""
    at = 0
    while (begin := text.find(OPENING, at)) >= 0:
        end = text.find(CLOSING, begin)
        if end < 0:
            return
        yield text[begin + len(OPENING) : end]
        at = end + len(CLOSING)


def hermes(text: str, tools: Tools) -> tuple[str, Iterator[Function]]:
    calls = (function_of(parsed(block), "arguments") for block in blocks(text))
    return text.partition(OPENING)[0], calls


def qwen3_xml(text: str, tools: Tools) -> tuple[str, Iterator[Function]]:
    return text.partition(OPENING)[0], (xml_function(block, tools) for block in blocks(text))


def xml_function(block: str, tools: Tools) -> Function:
    """A value whose schema is not a string is read as JSON where it is some; any other stays text."""
    found = XML_FUNCTION.fullmatch(block)
    if found is None:
        raise Malformed
    name, body = found[1].strip(), found[2]
    schemas, arguments = schemas_of(name, tools), {}
    for part in body.split("<parameter=")[1:]:
        key, separator, rest = part.partition(">")
        value, closing, after = rest.rpartition("</parameter>")
        if not separator or not closing or after.strip() or key in arguments:
            raise Malformed
        text = value.removeprefix("\n").removesuffix("\n")
        arguments[key] = text if schemas.get(key, {}).get("type", "string") == "string" else json_or_text(text)
    if body.partition("<parameter=")[0].strip():
        raise Malformed
    return made(name, arguments)


def schemas_of(name: str, tools: Tools) -> Mapping[str, Mapping[str, Any]]:
    """The schemas of a tool's parameters by name; those that are no objects are left out."""
    for tool in tools:
        function = tool.get("function")
        if isinstance(function, dict) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, dict) else None
            return {k: v for k, v in properties.items() if isinstance(v, dict)} if isinstance(properties, dict) else {}
    return {}


def json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"True": True, "False": False, "None": None}.get(text.strip(), text)


def llama3_json(text: str, tools: Tools) -> tuple[str, Iterator[Function]]:
    """One call: the templates of the family render no more."""
    content, answer = whole_answer(text)
    if not answer.startswith("{") or '"name"' not in answer:
        return text, iter(())
    return content, iter([function_of(parsed(answer), "parameters", "arguments")])


def mistral(text: str, tools: Tools) -> tuple[str, Iterator[Function]]:
    content, _, rest = text.partition(TOOL_CALLS)
    if rest.lstrip().startswith("["):
        records = parsed(rest)
        return content, (function_of(record, "arguments") for record in records)
    return content, (mistral_function(part) for part in rest.split(TOOL_CALLS) if rest)


def mistral_function(text: str) -> Function:
    """NAME[ARGS]{...} or NAME{...}, with [CALL_ID]... between in some versions."""
    n_name = min((at for mark in END_OF_NAME if (at := text.find(mark)) >= 0), default=-1)
    name = text[:n_name].strip()
    arguments = parsed(text.partition(ARGS)[2] if ARGS in text else text[max(n_name, 0) :])
    if n_name < 1 or not name or not isinstance(arguments, dict):
        raise Malformed
    return made(name, arguments)


def pythonic(text: str, tools: Tools) -> tuple[str, Iterator[Function]]:
    content, answer = whole_answer(text)
    if not (answer.startswith("[") and answer.endswith("]") and "(" in answer):
        return text, iter(())
    if len(answer) > MOST_PYTHON:
        raise Malformed
    try:
        body = ast.parse(answer, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise Malformed from None
    if not isinstance(body, ast.List):
        raise Malformed
    return content, (python_function(call) for call in body.elts)


def whole_answer(text: str) -> tuple[str, str]:
    """The text before the tag, and what follows it; without a tag the answer is all of the text."""
    content, tag, answer = text.partition(PYTHON_TAG)
    return (content, answer.strip()) if tag else ("", text.strip())


def python_function(call: ast.expr) -> Function:
    """A call with literals by keyword; nothing is evaluated."""
    if not isinstance(call, ast.Call) or call.args or any(word.arg is None for word in call.keywords):
        raise Malformed
    try:
        name = ast.unparse(call.func)
        arguments = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Malformed from None
    if not re.fullmatch(r"[\w.]+", name):
        raise Malformed
    return made(name, arguments)


@dataclass(frozen=True, slots=True)
class Form:
    """A form of tool calls."""

    read: Callable[[str, Tools], tuple[str, Iterator[Function]]]  # the text before the calls, and the calls
    marks: tuple[str, ...]  # all of these stand in the chat templates that teach it
    has_special_marks: bool = False  # its marks are special tokens, which plain decoding leaves out
    id_form: str = "call_{}"  # of the number of a call


FORMS: dict[str, Form] = {  # the first one whose marks a template has is that of the model
    "qwen3_xml": Form(qwen3_xml, ("<function=",)),
    "mistral": Form(mistral, (TOOL_CALLS,), has_special_marks=True, id_form="{:09d}"),  # its templates want nine digits
    "hermes": Form(hermes, (OPENING,)),
    "pythonic": Form(pythonic, ("func_name1(",)),
    "llama3_json": Form(llama3_json, ('"parameters"', "ipython"), has_special_marks=True),
}


def form_of(template: str) -> Form:
    """The form that a chat template teaches; hermes where none is known."""
    known = (form for form in FORMS.values() if all(mark in template for mark in form.marks))
    return next(known, FORMS["hermes"])


def text_with_marks(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of an answer with those special tokens that mark tool calls, and no other one."""
    special = set(tokenizer.all_special_ids)
    kept = [i for i in ids if i not in special or tokenizer.convert_ids_to_tokens(i) in SPECIAL_MARKS]
    return str(tokenizer.decode(kept, skip_special_tokens=False))


def read_calls(text: str, form: Form, n_before: int, tools: Tools = ()) -> tuple[str, list[dict[str, Any]]]:
    """The text before the first tool call, and the calls, from number `n_before`; no calls if one is malformed."""
    calls: list[dict[str, Any]] = []
    try:
        content, functions = form.read(text, tools)
        for function in functions:
            if len(calls) == MOST_CALLS:
                return text, []
            calls.append({"id": form.id_form.format(n_before + len(calls)), "type": "function", "function": function})
    except Malformed:
        return text, []
    return (content, calls) if calls else (text, [])


def split_thought(text: str, prompt: str = "") -> tuple[str, str]:
    """The text up to the end of the last thought, and the answer after it. An unclosed thought is all of the text."""
    end = text.rfind("</think>")
    n = end + len("</think>") if end >= 0 else 0
    if "<think>" in text[n:] or (not n and prompt.rstrip().endswith("<think>")):
        return text, ""
    return text[:n], text[n:]
