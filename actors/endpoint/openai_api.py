"""The OpenAI chat-completions API: requests, responses, events, tool calls. Unsupported fields are rejected."""

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_bus.config.rollout import OURS
from areal_bus.foreign_text import cut

Message = dict[str, Any]  # role, content, and where they are there name, tool_calls, tool_call_id

ROLES = ("system", "developer", "user", "assistant", "tool")
MESSAGE_FIELDS = {"role", "content", "name", "tool_calls", "tool_call_id"}
IGNORED = {"user", "metadata", "safety_identifier", "prompt_cache_key"}  # labels without effect on the answer
IGNORED |= {"seed"}  # the samples of a group would be equal
CONTROLS = (  # OpenAI's fields, then those that vLLM and SGLang add
    *("stop", "frequency_penalty", "presence_penalty", "logit_bias"),
    *("top_k", "min_p", "min_tokens", "repetition_penalty", "stop_token_ids", "ignore_eos"),
)
SUPPORTED = {
    "model",  # any name: there is one model
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "temperature",
    "top_p",
    "stream",
    "stream_options",
    "logprobs",
    "tools",
    "tool_choice",
    "n",
    "chat_template_kwargs",
    *CONTROLS,
}
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
TOOL_CHOICES = ("auto", "none", "required")


MOST_STOPS, LONGEST_STOP = 64, 1000  # stop strings of a request, and characters of one: each token is compared
MOST_CHOICES = 16
MOST_TOOLS = 512  # of a request: the text of the template is searched for each name
DEEPEST = 200  # levels of lists and objects in a request


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
        if name not in SUPPORTED and name not in IGNORED and value not in DEFAULTS.get(name, ()):
            reason = f" ({REASONS[name]})" if name in REASONS else ""
            raise RequestRejected(f"{name} = {shown(value)} is not supported{reason}: leave it out")
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RequestRejected("messages must be a list of one message or more")
    options, stream = fields.get("stream_options", {}), read_flag(fields, "stream")
    if not isinstance(options, dict) or not options.keys() <= {"include_usage", "include_obfuscation"}:
        raise RequestRejected(f"stream_options may hold include_usage only: it is {shown(options)}")
    if options and not stream:
        raise RequestRejected("stream_options need stream = true: leave them out")
    tools, choice, n = read_tools(fields.get("tools", [])), fields.get("tool_choice", "auto"), fields.get("n", 1)
    if choice not in TOOL_CHOICES:
        raise RequestRejected(f"tool_choice must be one of {', '.join(TOOL_CHOICES)}: it is {shown(choice)}")
    if read_whole(n, "n", least=1) > MOST_CHOICES:
        raise RequestRejected(f"n must be at most {MOST_CHOICES}: it is {n}")
    return ChatCall(
        messages=tuple(read_message(message, at) for at, message in enumerate(messages)),
        body=body,
        tools=tools,
        reads_tool_calls=bool(tools) and choice != "none",
        n=n,
        max_tokens=read_max_tokens(fields),
        temperature=read_number(fields, "temperature"),
        top_p=read_number(fields, "top_p"),
        stream=stream,
        stream_usage=options.get("include_usage") is not None and read_flag(options, "include_usage"),
        logprobs=read_flag(fields, "logprobs"),
        controls=read_controls(fields),
        template_arguments=read_arguments(fields.get("chat_template_kwargs", {})),
    )


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


def read_message(message: Any, at: int) -> Message:
    """The message for the chat template: content as text, without empty fields. Raises RequestRejected."""
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise RequestRejected(f"messages[{at}] must be an object with a role, one of {', '.join(ROLES)}")
    set_fields = {name: value for name, value in message.items() if value not in (None, [], {})}
    unknown = sorted(set_fields.keys() - MESSAGE_FIELDS)
    if unknown:
        raise RequestRejected(f"messages[{at}].{unknown[0]} is not supported: leave it out")
    role = "system" if message["role"] == "developer" else message["role"]
    read: Message = {"role": role, "content": read_content(message.get("content"), at)}
    for name in ("name", "tool_call_id"):
        if name in set_fields:
            read[name] = read_text(set_fields[name], f"messages[{at}].{name}")
    if "tool_calls" in set_fields:
        read["tool_calls"] = [read_tool_call(call, at) for call in as_list(set_fields["tool_calls"], at)]
    return read


def read_content(content: Any, at: int) -> str:
    """The content as text; text parts are joined."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in as_list(content, at):
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestRejected(f"messages[{at}].content must be text, or parts of the type text")
        texts.append(part["text"])
    return "".join(texts)


def read_tool_call(call: Any, at: int) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise RequestRejected(f"messages[{at}].tool_calls must be calls of functions")
    name, arguments = function.get("name"), function.get("arguments")
    return {
        "id": read_text(call.get("id"), f"messages[{at}].tool_calls[].id"),
        "type": "function",
        "function": {
            "name": read_text(name, f"messages[{at}].tool_calls[].function.name"),
            "arguments": read_text(arguments, f"messages[{at}].tool_calls[].function.arguments"),
        },
    }


def read_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    if not isinstance(tools, list) or len(tools) > MOST_TOOLS:
        raise RequestRejected(f"tools must be a list of at most {MOST_TOOLS} functions")
    for at, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if (
            not isinstance(function, dict)
            or tool.get("type") != "function"
            or not isinstance(function.get("name"), str)
        ):
            raise RequestRejected(f"tools[{at}] must be a function with a name")
    return tuple(tools)


def read_max_tokens(fields: Mapping[str, Any]) -> int | None:
    """The smaller one of max_tokens and max_completion_tokens."""
    given = [fields[name] for name in ("max_tokens", "max_completion_tokens") if name in fields]
    if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in given):
        raise RequestRejected(f"max_tokens must be a whole number of at least 1: it is {shown(given[0])}")
    return min(given, default=None)


def read_number(fields: Mapping[str, Any], name: str) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e9 < value < 1e9:
        raise RequestRejected(f"{name} must be a number: it is {shown(value)}")
    return float(value)


def read_flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise RequestRejected(f"{name} must be true or false: it is {shown(value)}")
    return value


def read_controls(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of SamplingControls that a request sets. Raises RequestRejected; the engine checks their ranges."""
    found: dict[str, Any] = {}
    for name in ("frequency_penalty", "presence_penalty", "repetition_penalty", "min_p"):
        if name in fields:
            found[name] = read_number(fields, name)
    if "top_k" in fields:
        found["top_k"] = max(0, read_whole(fields["top_k"], "top_k", least=-1))  # -1: all
    if "min_tokens" in fields:
        found["min_new_tokens"] = read_whole(fields["min_tokens"], "min_tokens")
    if "ignore_eos" in fields:
        found["ignore_eos"] = read_flag(fields, "ignore_eos")
    if "stop" in fields:
        found["stop"] = read_stops(fields["stop"])
    if "stop_token_ids" in fields:
        found["stop_token_ids"] = read_token_ids(fields["stop_token_ids"])
    if "logit_bias" in fields:
        found["logit_bias"] = read_bias(fields["logit_bias"])
    return found


def read_arguments(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict) or value.keys() & set(OURS):
        raise RequestRejected(f"chat_template_kwargs must hold arguments of the template: it is {shown(value)}")
    return value


def read_whole(value: Any, name: str, *, least: int = 0) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise RequestRejected(f"{name} must be a whole number of at least {least}: it is {shown(value)}")
    return value


def read_stops(value: Any) -> tuple[str, ...]:
    """One text, or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise RequestRejected(f"stop must be a text, or a list of texts, none of them empty: it is {shown(value)}")
    if len(stops) > MOST_STOPS or max(map(len, stops), default=0) > LONGEST_STOP:
        raise RequestRejected(f"stop has at most {MOST_STOPS} texts of at most {LONGEST_STOP} characters")
    return tuple(stops)


def read_token_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list):
        raise RequestRejected(f"stop_token_ids must be a list of token ids: it is {shown(value)}")
    return tuple(read_whole(token, "stop_token_ids[]") for token in value)


def read_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """{"50256": -100}: token ids are texts, as in all of JSON."""
    if not isinstance(value, dict) or not all(token.isdecimal() and len(token) < 20 for token in value):
        raise RequestRejected(f"logit_bias must be an object of token ids and numbers: it is {shown(value)}")
    return tuple((int(token), read_number(value, token) or 0.0) for token in value)


def read_text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise RequestRejected(f"{where} must be text: it is {shown(value)}")
    return value


def as_list(value: Any, at: int) -> list[Any]:
    if not isinstance(value, list):
        raise RequestRejected(f"messages[{at}] must hold text or lists: it has {shown(value)}")
    return value


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
