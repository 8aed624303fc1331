"""Calls of an OpenAI-compatible server: retried with back-off, within the deadline and the budget of a score.

`JudgeOptions` are the settings of the judge as a worker process has them.
"""

import os
import random
import time
from dataclasses import dataclass
from typing import Any

import httpx2

from actors.rewards.judge.store import JudgeStore


@dataclass(frozen=True, slots=True)
class JudgeOptions:
    """[reward.judge] and what goes with it."""

    url: str
    model: str
    prompt: str
    api_key_env: str = ""
    max_score: float = 1.0
    correct_from: float | None = None
    temperature: float = 0.0
    max_tokens: int = 512
    call_timeout_s: float = 30.0
    max_retries: int = 8
    max_concurrent: int = 8
    max_calls: int | None = None
    max_budget_tokens: int | None = None
    cache: bool = True
    score_s: float = 8.0  # for one score: all calls and pauses
    folder: str = ""  # of the store; "": one of this process


RETRIED = (408, 409, 425, 429)  # and 5xx: the server may answer the same call later
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0
TEXT = 300  # characters of an answer in an error
CUT = ("length", "max_tokens", "content_filter")  # finish_reason of a reply without its end


class JudgeAway(Exception):
    """The judge gave no answer to any call of this score."""


class JudgeRejects(Exception):
    """The judge rejects the call, and would again: a wrong URL, model or key."""


class NotNow(Exception):
    """One call had no answer; `pause_s` is the wait that the server asks for."""

    def __init__(self, why: str, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.pause_s = pause_s


@dataclass(frozen=True, slots=True)
class JudgeReply:
    """The text of an answer and the tokens of the call, 0 if the server does not report them."""

    text: str
    n_tokens: int
    is_cut: bool = False  # at max_tokens, or by a filter of the server


class JudgeClient:
    """Connections of this process to one judge."""

    def __init__(self, options: JudgeOptions, store: JudgeStore) -> None:
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._options, self._store = options, store
        self._http = httpx2.Client(headers=headers, follow_redirects=False)
        self._url = f"{options.url.rstrip('/')}/chat/completions"

    def ask(self, body: dict[str, Any], *, deadline: float) -> JudgeReply:
        """The reply to a request. Raises JudgeAway, JudgeRejects, BudgetSpent or NoSlot."""
        for n in range(1, self._options.max_retries + 2):
            try:
                return self._call(body, deadline)
            except NotNow as error:
                last, pause_s = error, max(error.pause_s, back_off_s(n))
            if n > self._options.max_retries or time.monotonic() + pause_s >= deadline:
                break
            time.sleep(pause_s)
        raise JudgeAway(f"the judge at {self._url} must answer: {n} calls had no answer; the last: {last}") from last

    def _call(self, body: dict[str, Any], deadline: float) -> JudgeReply:
        """One call, which holds a slot and is paid for only when it is answered."""
        options, store = self._options, self._store
        with store.slot(options.max_concurrent, deadline=deadline):
            store.reserve(max_calls=options.max_calls, max_tokens=options.max_budget_tokens)
            try:
                response = self._post(body, deadline)
            except BaseException:
                store.give_back()
                raise
            reply = read(response)
            store.add_tokens(reply.n_tokens)
            return reply

    def _post(self, body: dict[str, Any], deadline: float) -> httpx2.Response:
        """Raises NotNow or JudgeRejects for anything but an answer with status 200."""
        timeout_s = min(self._options.call_timeout_s, max(deadline - time.monotonic(), 0.1))
        try:
            response = self._http.post(self._url, json=body, timeout=timeout_s)
        except httpx2.TransportError as error:
            raise NotNow(f"{type(error).__name__}: {error}") from error
        status = response.status_code
        if status in RETRIED or status >= 500:
            raise NotNow(f"status {status}: {response.text[:TEXT]}", asked_pause_s(response))
        if status != 200:
            raise JudgeRejects(f"the judge at {self._url} rejects the call: status {status}: {response.text[:TEXT]}")
        return response


def back_off_s(n: int) -> float:
    """The pause after the n-th call: doubled each time, and drawn so that workers do not return together."""
    return float(min(FIRST_PAUSE_S * 2 ** (n - 1), LONGEST_PAUSE_S) * random.uniform(0.5, 1.0))


def asked_pause_s(response: httpx2.Response) -> float:
    """Retry-After in seconds; 0 without one, or for a date."""
    asked = response.headers.get("Retry-After", "")
    return float(asked) if asked.isascii() and asked.isdigit() else 0.0


def read(response: httpx2.Response) -> JudgeReply:
    """The first choice of a chat completion. Raises ValueError for anything else."""
    try:
        answer = response.json()
        choice = answer["choices"][0]
        text, finish = choice["message"]["content"], choice.get("finish_reason")
        n_tokens = (answer.get("usage") or {}).get("total_tokens", 0)
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ValueError(f"the judge must answer with a chat completion: {response.text[:TEXT]!r}") from None
    if not isinstance(text, str):
        raise ValueError(f"the reply of the judge must be text: it is a {type(text).__name__}")
    return JudgeReply(text, n_tokens if type(n_tokens) is int and n_tokens > 0 else 0, finish in CUT)
