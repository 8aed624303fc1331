"""The tokens of one conversation, in which no sampled token is ever made from text again; knows no engine or socket.

The first call is rendered by the chat template. A further one goes on from the tokens there are: what the template
writes after the model's last answer is added to them, and nothing before that is touched. To learn what that is, the
template is rendered with a mark in place of the last answer, and what comes after the mark is taken.
"""

import json
import uuid
from collections.abc import Sequence
from typing import Any

from actors.endpoint.openai_api import Message, RequestRejected
from areal_bus.messages import Finish

MARK = uuid.uuid4().hex  # of this process: in nobody's text

Tools = Sequence[dict[str, Any]]


class HistoryRewritten(RequestRejected):
    """The messages are no extension of those before."""


class Conversation:
    """All messages and tokens so far."""

    def __init__(self, tokenizer: Any, template: str = "") -> None:
        """`template`: a Jinja template in place of the tokenizer's own."""
        self.messages: list[Message] = []
        self.ids: list[int] = []
        self._tools: list[dict[str, Any]] = []
        self._has_ended = False  # the last answer's last token is a stop token
        self._tokenizer, self._template = tokenizer, template or None

    def extend(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        """The tokens that a completion of these messages goes on from. Raises Refused, Rewritten; keeps nothing."""
        if not self.messages:
            text = self._render(messages, tools)
            unseen = [name for tool in tools if (name := tool["function"]["name"]) not in text]
            if unseen:
                raise RequestRejected(f"the chat template must write the tools: it does not write {unseen[0]!r}")
            return self._tokens(text)
        self._check_extends(messages, tools)
        n = len(self.messages)
        marked = [*messages[: n - 1], {"role": "assistant", "content": MARK}, *messages[n:]]
        text = self._render(marked, tools)
        if text.count(MARK) != 1:
            raise RequestRejected(
                "the chat template must write each message once: it does not write the last answer so"
            )
        added = self._tokens(text.partition(MARK)[2])
        if self._has_ended and added[:1] == self.ids[-1:]:  # the answer has its end already
            del added[0]
        return [*self.ids, *added]

    def record(self, messages: Sequence[Message], tools: Tools, ids: list[int], answer: Message, finish: str) -> None:
        """The call with these messages was answered; `ids`: all tokens now, the sampled ones last."""
        self.messages, self._tools = [*messages, answer], list(tools)
        self.ids, self._has_ended = ids, finish == Finish.STOP

    def forget(self) -> None:
        """The next call begins the conversation."""
        self.messages, self.ids, self._tools, self._has_ended = [], [], [], False

    def _check_extends(self, messages: Sequence[Message], tools: Tools) -> None:
        if list(tools) != self._tools:
            raise HistoryRewritten("a conversation keeps its tools: they differ from those of the call before")
        n = len(self.messages)
        for at, known in enumerate(self.messages):
            if at >= len(messages) or comparable(messages[at]) != comparable(known):
                raise HistoryRewritten(
                    f"a call goes on from the conversation so far, {n} messages with the last answer: messages[{at}] "
                    f"{'is not there' if at >= len(messages) else 'differs'}"
                )
        if len(messages) == n:
            raise HistoryRewritten("a further call brings a message or more after the last answer: it brings none")

    def _render(self, messages: Sequence[Message], tools: Tools) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [for_template(message) for message in messages],
                tools=list(tools) or None,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
            )
        except Exception as error:  # noqa: BLE001  a template raises what it likes for what it has no form for
            raise RequestRejected(
                f"the chat template has no form for these messages: {type(error).__name__}: {error}"
            ) from None
        return str(text)

    def _tokens(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])


def comparable(message: Message) -> Message:
    """Clients cut white space around an answer, which changes none of its tokens."""
    if message["role"] != "assistant":
        return message
    return message | {"content": message["content"].strip()}


def for_template(message: Message) -> Message:
    """Templates write a call's arguments themselves, from an object."""
    if "tool_calls" not in message:
        return message
    calls = [{**call, "function": unfolded(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls}


def unfolded(function: dict[str, Any]) -> dict[str, Any]:
    try:
        return function | {"arguments": json.loads(function["arguments"])}
    except (ValueError, RecursionError):
        return function
