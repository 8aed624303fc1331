"""Answers in OpenAI's form, from what was sampled; knows no socket and no conversation."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from actors.endpoint.asking import Call, Message


@dataclass(frozen=True, slots=True)
class Sampled:
    """One completion as its agent gets it."""

    message: Message  # role, content, tool_calls where there are some
    finish: str  # "stop", "length" or "tool_calls"
    n_prompt: int  # tokens
    tokens: list[str]  # each sampled one's text
    logps: list[float]
    version: int  # newest that sampled


def completion(call: Call, sampled: Sampled, *, id: str, model: str) -> dict[str, Any]:
    """The whole answer."""
    message = {"role": "assistant", "refusal": None, **sampled.message, "content": sampled.message["content"] or None}
    if not message.get("tool_calls"):
        message["content"] = sampled.message["content"]
    choice = {"index": 0, "message": message, "finish_reason": sampled.finish, "logprobs": logprobs(call, sampled)}
    return head(sampled, "chat.completion", id, model) | {"choices": [choice], "usage": usage(sampled)}


def chunks(call: Call, sampled: Sampled, *, id: str, model: str) -> Iterator[dict[str, Any]]:
    """The answer as a stream: all of the message in one piece, for it is there as a whole."""
    start = head(sampled, "chat.completion.chunk", id, model)
    calls = [{"index": at, **call} for at, call in enumerate(sampled.message.get("tool_calls", []))]
    delta = {"role": "assistant", "content": sampled.message["content"], **({"tool_calls": calls} if calls else {})}
    piece = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs(call, sampled)}
    end = {"index": 0, "delta": {}, "finish_reason": sampled.finish, "logprobs": None}
    yield start | {"choices": [piece]}
    yield start | {"choices": [end]}
    if call.stream_usage:
        yield start | {"choices": [], "usage": usage(sampled)}


def head(sampled: Sampled, kind: str, id: str, model: str) -> dict[str, Any]:
    """`system_fingerprint` names the weights, as OpenAI's names what a system runs on."""
    fingerprint = f"version-{sampled.version}"
    return {"id": id, "object": kind, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}


def usage(sampled: Sampled) -> dict[str, int]:
    n_sampled = len(sampled.logps)
    return {
        "prompt_tokens": sampled.n_prompt,
        "completion_tokens": n_sampled,
        "total_tokens": sampled.n_prompt + n_sampled,
    }


def logprobs(call: Call, sampled: Sampled) -> dict[str, Any] | None:
    """One entry for each sampled token, the stop token included; None unless the call asked for them."""
    if not call.logprobs:
        return None
    content = [
        {"token": token, "logprob": logp, "bytes": list(token.encode()), "top_logprobs": []}
        for token, logp in zip(sampled.tokens, sampled.logps, strict=True)
    ]
    return {"content": content, "refusal": None}


def models(model: str) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": model, "object": "model", "created": 0, "owned_by": "areal-bus"}]}


def error(sentence: str, *, status: int, code: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": sentence, "type": kind, "param": None, "code": code}}


def as_bytes(record: dict[str, Any]) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def as_event(record: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + as_bytes(record) + b"\n\n"
