"""The tokens of one conversation. Sampled tokens are kept and never tokenized again from text.

The template renders the first call. Later calls append what it writes after a marker in place of the last answer.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from actors.endpoint.openai_api import Message, RequestRejected
from areal_bus.foreign_text import described
from areal_bus.messages import Finish

MARKER = uuid.uuid4().hex  # unique: occurs in no text

NONE: Mapping[str, Any] = {}
Tools = Sequence[dict[str, Any]]


class HistoryRewritten(RequestRejected):
    """The messages do not extend those of the call before."""


class Conversation:
    """The messages and tokens so far."""

    def __init__(self, tokenizer: Any, template: str = "", arguments: Mapping[str, Any] = NONE) -> None:
        """`template`: a Jinja template to use instead of the tokenizer's; `arguments`: of the template."""
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self._tools: list[dict[str, Any]] = []
        self._has_stop = False  # the last answer ends with a stop token
        self._tokenizer, self._template, self._arguments = tokenizer, template or None, arguments

    def extend(self, messages: Sequence[Message], tools: Tools, arguments: Mapping[str, Any] = NONE) -> list[int]:
        """The tokens to complete; changes no state. `arguments`: of the template. RequestRejected, HistoryRewritten."""
        if not self.messages:
            text = self._render(messages, tools, arguments)
            missing = [name for tool in tools if (name := tool["function"]["name"]) not in text]
            if missing:
                raise RequestRejected(f"the chat template must write the tools: it does not write {missing[0]!r}")
            return self._tokens(text)
        self._check_extends(messages, tools)
        n = len(self.messages)
        marked = [*messages[: n - 1], {"role": "assistant", "content": MARKER}, *messages[n:]]
        text = self._render(marked, tools, arguments)
        if text.count(MARKER) != 1:
            raise RequestRejected(
                "the chat template must write each message exactly once: it does not so for the last answer"
            )
        added = self._tokens(text.partition(MARKER)[2])
        if self._has_stop and added[:1] == self.ids[-1:]:  # the answer's stop token is there already
            del added[0]
        return [*self.ids, *added]

    def record(self, messages: Sequence[Message], tools: Tools, ids: list[int], answer: Message, finish: str) -> None:
        """Record an answered call. `ids`: all tokens, the sampled ones last."""
        self.messages, self._tools = [*messages, answer], list(tools)
        self.ids, self._has_stop = ids, finish == Finish.STOP

    def _check_extends(self, messages: Sequence[Message], tools: Tools) -> None:
        if list(tools) != self._tools:
            raise HistoryRewritten("the tools of a conversation must not change: they differ from the call before")
        n = len(self.messages)
        for at, known in enumerate(self.messages):
            if at >= len(messages) or comparable(messages[at]) != comparable(known):
                raise HistoryRewritten(
                    f"a call must begin with the {n} messages so far, the last answer included: messages[{at}] "
                    f"{'is missing' if at >= len(messages) else 'differs'}"
                )
        if len(messages) == n:
            raise HistoryRewritten("a further call must add a message after the last answer: it adds none")

    def _render(self, messages: Sequence[Message], tools: Tools, arguments: Mapping[str, Any]) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [for_template(message) for message in messages],
                **{
                    **self._arguments,
                    **arguments,
                    "tools": list(tools) or None,
                    "chat_template": self._template,
                    "tokenize": False,
                    "add_generation_prompt": True,
                },
            )
        except Exception as error:  # noqa: BLE001  templates raise any error for unsupported messages
            raise RequestRejected(f"the chat template cannot render these messages: {described(error)}") from None
        return str(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def comparable(message: Message) -> Message:
    """The message without white space around an answer, which clients strip and which changes no tokens."""
    if message["role"] != "assistant":
        return message
    return message | {"content": message["content"].strip()}


def for_template(message: Message) -> Message:
    """The message with the arguments of tool calls as objects, as templates expect them."""
    if not message.get("tool_calls"):
        return message
    calls = [{**call, "function": parse_arguments(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def parse_arguments(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return function | {"arguments": json.loads(function["arguments"])}
    except (ValueError, TypeError, LookupError, RecursionError):  # no JSON, an object already, or none
        return function
