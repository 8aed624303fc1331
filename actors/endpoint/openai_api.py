"""The OpenAI chat-completions API: requests, responses, events, tool calls. Unsupported fields are rejected."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from areal_bus.config.rollout import OURS
from areal_bus.foreign_text import cut

Message = dict[str, Any]  # role, content, and where they are there name, tool_calls, tool_call_id

IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # labels without effect on the answer
IGNORED |= {"seed"}  # the samples of a group would be equal
IGNORED |= {"model"}  # any name: there is one model
DEFAULTS: Mapping[str, tuple[Any, ...]] = {  # accepted with these values, which request the default behaviour
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "modalities": (["text"],),
    "store": (False,),
    "service_tier": ("auto", "default"),
}
REASONS: Mapping[str, str] = {  # why others are refused
    "response_format": "no engine constrains tokens, since log-probs must be the model's own: ask for JSON in the "
    "prompt, and reward it",
    "top_logprobs": "engines return the log-probs of sampled tokens only",
}
MOST_STOPS, LONGEST_STOP = 64, 1000  # stop strings of a request, and characters of one: each token is compared
MOST_CHOICES = 16
MOST_TOOLS = 512  # of a request: the text of the template is searched for each name
DEEPEST = 200  # levels of lists and objects in a request
Number = Annotated[float, Field(gt=-1e9, lt=1e9)]


class _Strict(BaseModel):
    """A part of a request. Fields that it does not list are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, frozen=True)


class _CalledFunction(_Strict):
    name: str
    arguments: str


class _ToolCall(_Strict):
    id: str
    type: Literal["function"] = "function"
    function: _CalledFunction


class _TextPart(_Strict):
    type: Literal["text"]
    text: str


def _listed(value: Any) -> Any:
    """A text is a list of one."""
    return [value] if isinstance(value, str) else value


class _ChatMessage(_Strict, extra="forbid"):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: list[_TextPart] = []
    name: str | None = None
    tool_calls: list[_ToolCall] = []
    tool_call_id: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_empty_fields(cls, message: Any) -> Any:
        if not isinstance(message, dict):
            return message
        content = message.get("content")
        message = {name: value for name, value in message.items() if value not in (None, [], {})}
        if content == {}:  # neither text nor parts
            return message | {"content": content}
        return message | ({"content": [{"type": "text", "text": content}]} if isinstance(content, str) else {})

    def for_template(self) -> Message:
        """The message for the chat template: content as text, without empty fields."""
        role = "system" if self.role == "developer" else self.role
        read: Message = {"role": role, "content": "".join(part.text for part in self.content)}
        calls = [call.model_dump() for call in self.tool_calls]
        more = {"name": self.name, "tool_call_id": self.tool_call_id, "tool_calls": calls or None}
        return read | {name: value for name, value in more.items() if value is not None}


class _ToolFunction(_Strict):
    name: str


class _Tool(_Strict):
    type: Literal["function"]
    function: _ToolFunction


class _StreamOptions(_Strict, extra="forbid"):
    include_usage: bool | None = None
    include_obfuscation: Any = None


class _Controls(_Strict):
    """OpenAI's fields, then those that vLLM and SGLang add. The engine checks their ranges."""

    stop: Annotated[list[Annotated[str, Field(min_length=1, max_length=LONGEST_STOP)]], BeforeValidator(_listed)] = (
        Field([], max_length=MOST_STOPS)
    )
    frequency_penalty: Number = 0.0
    presence_penalty: Number = 0.0
    logit_bias: dict[Annotated[str, Field(pattern="^[0-9]{1,19}$")], Number] = {}  # {"50256": -100}
    top_k: int = Field(0, ge=-1)  # -1: all
    min_p: Number = 0.0
    min_tokens: int = Field(0, ge=0)
    repetition_penalty: Number = 1.0
    stop_token_ids: list[Annotated[int, Field(ge=0)]] = []
    ignore_eos: bool = False

    def given(self) -> dict[str, Any]:
        """The fields of SamplingControls that the request sets."""
        found = self.model_dump(include=set(_Controls.model_fields), exclude_unset=True)
        for name in found.keys() & {"stop", "stop_token_ids"}:
            found[name] = tuple(found[name])
        if "logit_bias" in found:
            found["logit_bias"] = tuple((int(token), bias) for token, bias in found["logit_bias"].items())
        if "top_k" in found:
            found["top_k"] = max(0, found["top_k"])
        if "min_tokens" in found:
            found["min_new_tokens"] = found.pop("min_tokens")
        return found


class _ChatRequest(_Controls):
    messages: list[_ChatMessage] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    temperature: Number | None = None
    top_p: Number | None = None
    stream: bool = False
    stream_options: _StreamOptions = _StreamOptions()
    logprobs: bool = False
    tools: list[_Tool] = Field([], max_length=MOST_TOOLS)
    tool_choice: Literal["auto", "none", "required"] = "auto"
    n: int = Field(1, ge=1, le=MOST_CHOICES)
    chat_template_kwargs: dict[str, Any] = {}


class RequestRejected(Exception):
    """A rejected request; the text has the reason, and may quote the request: it is cut. It changes no state."""

    def __init__(self, sentence: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(cut(sentence))
        self.status, self.code = status, code


@dataclass(frozen=True, slots=True)
class ChatCall:
    """One request for a completion of a conversation."""

    messages: tuple[Message, ...]
    body: bytes  # the raw request; an equal one may be a retry
    tools: tuple[dict[str, Any], ...] = ()
    reads_tool_calls: bool = False  # tools are there, and tool_choice allows calls
    n: int = 1  # choices
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    stream_usage: bool = False  # the last chunk has the usage
    logprobs: bool = False
    controls: Mapping[str, Any] = field(default_factory=dict)  # fields of SamplingControls that it sets
    template_arguments: Mapping[str, Any] = field(default_factory=dict)


def read_call(body: bytes) -> ChatCall:
    """Parse a request body. Raises RequestRejected."""
    fields = {name: value for name, value in read_object(body).items() if value is not None}  # null is "not set"
    for name, value in fields.items():
        if name not in _ChatRequest.model_fields and name not in IGNORED and value not in DEFAULTS.get(name, ()):
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            raise RequestRejected(f"{name} = {shown(value)} is not supported{reason}: leave it out")
    try:
        asked = _ChatRequest.model_validate(fields)
    except ValidationError as error:
        raise RequestRejected(in_words(error)) from None
    if fields.get("stream_options") and not asked.stream:
        raise RequestRejected("stream_options need stream = true: leave them out")
    if asked.chat_template_kwargs.keys() & set(OURS):
        raise RequestRejected(
            f"chat_template_kwargs must hold arguments of the template: it is {shown(asked.chat_template_kwargs)}"
        )
    limits = [n for n in (asked.max_tokens, asked.max_completion_tokens) if n is not None]
    return ChatCall(
        messages=tuple(message.for_template() for message in asked.messages),
        body=body,
        tools=tuple(fields.get("tools", ())),
        reads_tool_calls=bool(asked.tools) and asked.tool_choice != "none",
        n=asked.n,
        max_tokens=min(limits, default=None),
        temperature=asked.temperature,
        top_p=asked.top_p,
        stream=asked.stream,
        stream_usage=bool(asked.stream_options.include_usage),
        logprobs=asked.logprobs,
        controls=asked.given(),
        template_arguments=asked.chat_template_kwargs,
    )


def in_words(error: ValidationError) -> str:
    """The first fault: "invalid messages[0].role: input should be ...: it is ..."."""
    first = error.errors(include_url=False)[0]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).lstrip(".")
    if first["type"] == "missing":
        return f"invalid {where}: field required"
    if first["type"] == "extra_forbidden":
        return f"invalid {where}: it is not supported: leave it out"
    return f"invalid {where}: {first['msg'][:1].lower()}{first['msg'][1:]}: it is {shown(first['input'])}"


def read_object(body: bytes) -> dict[str, Any]:
    """The JSON object of a body. Raises RequestRejected, also for text that is not valid Unicode."""
    try:
        record = json.loads(body, parse_constant=refuse_constant)
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()  # also 1e999
    except (ValueError, RecursionError) as error:
        raise RequestRejected(f"the body must be JSON: {str(error)[:200]}") from None
    if not isinstance(record, dict):
        raise RequestRejected(f"the body must be one JSON object: it is a {type(record).__name__}")
    if is_deeper(record, DEEPEST):
        raise RequestRejected(f"the body must be nested at most {DEEPEST} deep")
    return record


def is_deeper(value: dict[str, Any] | list[Any], levels: int) -> bool:
    """Whether containers are nested more than `levels` deep, this one being the first level."""
    level: list[Any] = [value]
    for _ in range(levels):
        items = (item for one in level for item in (one.values() if isinstance(one, dict) else one))
        level = [item for item in items if isinstance(item, dict | list)]
        if not level:
            return False
    return True


def refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def shown(value: Any) -> str:
    """A value as JSON for error texts, cut to 80 characters."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}..."


@dataclass(frozen=True, slots=True)
class ChatCompletion:
    """One completion for the agent."""

    message: Message  # role, content, tool_calls where there are some
    finish: str  # "stop", "length" or "tool_calls"
    n_prompt: int  # tokens
    tokens: list[bytes]  # UTF-8 of each sampled token: a part of a character for some
    logps: list[float]
    version: int  # newest version of the sampled tokens


def completion(call: ChatCall, choices: Sequence[ChatCompletion], *, id: str, model: str) -> dict[str, Any]:
    """The response without streaming."""
    record = head(choices, "chat.completion", id, model)
    return record | {"choices": [choice(call, *one) for one in enumerate(choices)], "usage": usage(choices)}


def choice(call: ChatCall, index: int, sampled: ChatCompletion) -> dict[str, Any]:
    message = {"role": "assistant", "refusal": None, **sampled.message}
    if message.get("tool_calls"):
        message["content"] = message["content"] or None
    return {"index": index, "message": message, "finish_reason": sampled.finish, "logprobs": logprobs(call, sampled)}


def chunks(call: ChatCall, choices: Sequence[ChatCompletion], *, id: str, model: str) -> Iterator[dict[str, Any]]:
    """The response as a stream: of each choice its role, its text, its tool calls and its end; then the usage."""
    start = head(choices, "chat.completion.chunk", id, model) | ({"usage": None} if call.stream_usage else {})
    for index, sampled in enumerate(choices):
        for delta in deltas(sampled.message):
            found = logprobs(call, sampled) if "content" in delta and "role" not in delta else None
            yield start | {"choices": [{"index": index, "delta": delta, "finish_reason": None, "logprobs": found}]}
        end = {"index": index, "delta": {}, "finish_reason": sampled.finish, "logprobs": None}
        yield start | {"choices": [end]}
    if call.stream_usage:
        yield start | {"choices": [], "usage": usage(choices)}


def deltas(message: Message) -> Iterator[dict[str, Any]]:
    """The parts of a message as OpenAI streams them; a tool call begins with its name, its arguments follow."""
    yield {"role": "assistant", "content": "", "refusal": None}
    yield {"content": message["content"]}
    for index, call in enumerate(message.get("tool_calls", [])):
        function = call["function"]
        yield {"tool_calls": [{"index": index, **call, "function": {"name": function["name"], "arguments": ""}}]}
        yield {"tool_calls": [{"index": index, "function": {"arguments": function["arguments"]}}]}


def head(choices: Sequence[ChatCompletion], kind: str, id: str, model: str) -> dict[str, Any]:
    """The common fields. `system_fingerprint` is the version of the weights."""
    fingerprint = f"version-{choices[-1].version}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}


def usage(choices: Sequence[ChatCompletion]) -> dict[str, int]:
    n_given, n_sampled = choices[0].n_prompt, sum(len(one.logps) for one in choices)
    return {"prompt_tokens": n_given, "completion_tokens": n_sampled, "total_tokens": n_given + n_sampled}


def logprobs(call: ChatCall, sampled: ChatCompletion) -> dict[str, Any] | None:
    """One entry for each sampled token, the stop token included; None unless requested."""
    if not call.logprobs:
        return None
    content = [
        {"token": token.decode(errors="replace"), "logprob": logp, "bytes": list(token), "top_logprobs": []}
        for token, logp in zip(sampled.tokens, sampled.logps, strict=True)
    ]
    return {"content": content, "refusal": None}


def about_model(model: str) -> dict[str, Any]:
    return {"id": model, "object": "model", "created": 0, "owned_by": "areal-bus"}


def error(sentence: str, *, status: int, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}


def as_bytes(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def as_event(record: dict[str, Any]) -> bytes:
    """In ASCII: clients end a line of a stream also at U+0085, U+2028 and U+2029."""
    return b"data: " + json.dumps(json.loads(as_bytes(record)), separators=(",", ":")).encode() + b"\n\n"
