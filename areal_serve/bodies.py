"""Reads the JSON bodies of requests, and checks what a sampling request asks for. Raises Rejected."""

import json
from collections.abc import Mapping
from typing import Any, TypeVar

from aiohttp import web

from areal_serve.rejection import Rejected

Given = dict[str, Any]
Kind = TypeVar("Kind", dict[str, Any], list[Any], str, bool)
KINDS = {dict: "an object", list: "a list", str: "a string", bool: "true or false"}


async def read_json(request: web.Request) -> Given:
    try:
        body = (await request.read()).decode()
        found = json.loads(body)
        if "\\u" in body:
            json.dumps(found, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        raise Rejected("invalid body: it must be a JSON object") from None
    if not isinstance(found, dict):
        raise Rejected(f"invalid body: it must be a JSON object, not a {type(found).__name__}")
    return found


def text(given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value:
        raise Rejected(f"missing {name}: it must be a string, got {cut(value)}")
    return value


def whole(given: Mapping[str, Any], name: str, low: int = 0, high: int = (1 << 63) - 1) -> int:
    value = given.get(name)
    if not is_whole(value, low, high):
        raise Rejected(f"missing {name}: it must be a whole number from {low} to {high}, got {cut(value)}")
    return int(value)  # type: ignore[arg-type]


def optional(given: Mapping[str, Any], name: str, kind: type[Kind]) -> Kind | None:
    """A field of this type; None if it is missing or null."""
    value = given.get(name)
    if value is not None and type(value) is not kind:
        raise Rejected(f"invalid {name}: it must be {KINDS[kind]}, not {cut(value)}")
    return value


def is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high  # JSON's true is an int of Python, too


def cut(value: Any) -> str:
    return repr(value)[:80]


TOKEN = (1 << 31) - 1


def tokens(prompt: Any) -> list[int]:
    """The tokens of a prompt. Raises Rejected for anything but chunks of tokens."""
    found: list[int] = []
    chunks = prompt.get("chunks") if isinstance(prompt, dict) else None
    for chunk in chunks if isinstance(chunks, list) else [None]:
        tokens = chunk.get("tokens") if isinstance(chunk, dict) else None
        if not isinstance(tokens, list) or not all(is_whole(token, 0, TOKEN) for token in tokens):
            raise Rejected("unsupported prompt: this server takes chunks of token ids, no images and no audio")
        found += tokens
    if not found:
        raise Rejected("empty prompt: it needs at least one token")
    return found


PARAMS = ("max_tokens", "seed", "stop", "temperature", "top_k", "top_p")
RANGES = {"temperature": (1e-6, 1e6), "top_p": (1e-6, 1.0)}  # or 0
SCORED = (
    "prompt_logprobs",
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "prompt_logprobs_last_n",
)


def sampling_options(given: Given, n_prompt: int) -> Given:
    """What a sampling request asks for beside its prompt. Raises Rejected."""
    params = given.get("sampling_params")
    options: Given = {name: given.get(name) for name in SCORED}
    options["prompt_logprobs"] = bool(optional(given, "prompt_logprobs", bool))
    if not isinstance(params, dict):
        raise Rejected("missing sampling_params")
    params = {name: value for name in PARAMS if (value := params.get(name)) is not None}
    for name, low, high in (("max_tokens", 1, 1 << 24), ("seed", -(1 << 63), (1 << 64) - 1), ("top_k", -1, 1 << 24)):
        if name in params and not is_whole(params[name], low, high):
            raise Rejected(f"invalid {name} {cut(params[name])}: a whole number from {low} to {high}")
    for name, (least, most) in RANGES.items():
        value = params.get(name, 1.0)
        if type(value) not in (int, float) or not (value == 0 or least <= value <= most):
            raise Rejected(f"invalid {name} {cut(value)}: 0, or a number from {least:g} to {most:g}")
    stop = params.get("stop", "")
    if not isinstance(stop, str) and not (
        isinstance(stop, list) and all(isinstance(one, str) or is_whole(one, 0, TOKEN) for one in stop)
    ):
        raise Rejected(f"invalid stop {cut(stop)}: a string, or a list of strings or token ids")
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs", "prompt_alt_tokens_k"):
        if options[name] is not None and not is_whole(options[name], 0, 1024):
            raise Rejected(f"invalid {name} {cut(options[name])}: from 0 to 1024")
    last = options["prompt_logprobs_last_n"]
    if last is not None and not (is_whole(last, 1, n_prompt - 1) and options["prompt_logprobs"]):
        raise Rejected(f"invalid prompt_logprobs_last_n {cut(last)}: from 1 to {n_prompt - 1}, with prompt_logprobs")
    options["target_prompt_logprobs"] = _targets(given.get("target_prompt_logprobs"), n_prompt)
    return {**options, "sampling_params": params}


def _targets(given: Any, n_prompt: int) -> list[list[int]] | None:
    """(tokens of the prompt - 1, K) ids to score, -1 for none. Raises Rejected."""
    if given is None:
        return None
    shape, data = (given.get(name) if isinstance(given, dict) else None for name in ("shape", "data"))
    if not isinstance(shape, list) or len(shape) != 2 or not isinstance(data, list):
        raise Rejected("invalid target_prompt_logprobs: a tensor of two dimensions")
    if given.get("sparse_crow_indices") is not None:
        raise Rejected("unsupported target_prompt_logprobs: this server takes dense tensors of them")
    if not all(is_whole(value, -1, TOKEN) for value in data):
        raise Rejected(f"invalid target_prompt_logprobs: its data are token ids, or -1, at most {TOKEN}")
    rows, width = n_prompt - 1, len(data) // max(1, n_prompt - 1)
    if not data or shape != [rows, width] or rows * width != len(data):
        raise Rejected(
            f"shape mismatch: target_prompt_logprobs needs {rows} rows, got shape {cut(shape)} and {len(data)} values"
        )
    return [data[row * width : (row + 1) * width] for row in range(rows)]


def seed_of(request_id: str) -> list[int]:
    """Of a request without one: a request that is carried out again gives the same samples."""
    return list(request_id.encode())


def page(request: web.Request) -> tuple[int, int]:
    try:
        offset, limit = int(request.query.get("offset", 0)), int(request.query.get("limit", 100))
    except ValueError:
        raise Rejected("invalid page: offset and limit are whole numbers") from None
    return max(0, offset), max(1, min(limit, 1000))
