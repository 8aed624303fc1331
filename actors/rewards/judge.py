"""The reward `judge`: a language model behind an OpenAI-compatible URL grades the completion (docs/judge.md)."""

import hashlib
import json
import os
import random
import re
import sqlite3
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, TypeVar

import httpx2

from actors.rewards.protocol import Score
from areal_bus.errors import ConfigError

BUSY_S = 30.0  # longest wait for another process's transaction
TABLES = """
CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY, calls INTEGER NOT NULL, tokens INTEGER NOT NULL);
INSERT OR IGNORE INTO spent VALUES (0, 0, 0);
"""


class BudgetSpent(Exception):
    """The budget of judge calls of this run is spent."""


class JudgeStore:
    """The files below one folder. Opens the database for each access, so that a fork may use it, too."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._file = folder, folder / "judge.sqlite3"
        with self._open() as database:
            database.executescript(TABLES)

    def reply(self, key: str) -> str | None:
        """The kept reply, or None."""
        with self._open() as database:
            row = database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def keep(self, key: str, reply: str) -> None:
        with self._open() as database:
            database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))

    def reserve(self, *, max_calls: int | None) -> None:
        """Count one call. Raises BudgetSpent when all calls are used."""
        with self._open() as database:
            change = "UPDATE spent SET calls = calls + 1 WHERE ? IS NULL OR calls < ?"
            if database.execute(change, (max_calls, max_calls)).rowcount:
                return
            calls, tokens = database.execute("SELECT calls, tokens FROM spent").fetchone()
        raise BudgetSpent(
            f"the budget of the judge is spent on this host: {calls} calls of reward.judge.max_calls = {max_calls} "
            f"({tokens} tokens)"
        )

    def give_back(self) -> None:
        """The reserved call had no answer: it costs nothing."""
        with self._open() as database:
            database.execute("UPDATE spent SET calls = calls - 1")

    def add_tokens(self, n: int) -> None:
        with self._open() as database:
            database.execute("UPDATE spent SET tokens = tokens + ?", (n,))

    def spent(self) -> tuple[int, int]:
        """Answered calls (and those in flight), and their tokens."""
        with self._open() as database:
            calls, tokens = database.execute("SELECT calls, tokens FROM spent").fetchone()
        return int(calls), int(tokens)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._file, timeout=BUSY_S)) as database, database:
            yield database


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
    max_calls: int | None = None
    score_s: float = 8.0  # for one score: all calls and pauses
    folder: str = ""  # of the store; "": one of this process


CALL_S = 30.0  # longest wait for an answer to one call
MAX_RETRIES = 8  # further calls of one score; its deadline ends most before
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
    """Connections of this process to one server. `read`: the reply in a response with status 200."""

    def __init__(
        self, options: JudgeOptions, store: JudgeStore, url: str, read: Callable[[httpx2.Response], JudgeReply]
    ) -> None:
        key = os.environ.get(options.api_key_env, "") if options.api_key_env else ""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._options, self._store, self._read = options, store, read
        self._http = httpx2.Client(headers=headers, follow_redirects=False)
        self._url = url

    def ask(self, body: dict[str, Any], *, deadline: float) -> JudgeReply:
        """The reply to a request. Raises JudgeAway, JudgeRejects or BudgetSpent."""
        for n in range(1, MAX_RETRIES + 2):
            try:
                return self._call(body, deadline)
            except NotNow as error:
                last, pause_s = error, max(error.pause_s, back_off_s(n))
            if n > MAX_RETRIES or time.monotonic() + pause_s >= deadline:
                break
            time.sleep(pause_s)
        raise JudgeAway(f"no answer from the judge at {self._url} in {n} calls; the last: {last}") from last

    def _call(self, body: dict[str, Any], deadline: float) -> JudgeReply:
        """One call, paid for only when it is answered."""
        self._store.reserve(max_calls=self._options.max_calls)
        try:
            response = self._post(body, deadline)
        except BaseException:
            self._store.give_back()
            raise
        reply = self._read(response)
        self._store.add_tokens(reply.n_tokens)
        return reply

    def _post(self, body: dict[str, Any], deadline: float) -> httpx2.Response:
        """Raises NotNow or JudgeRejects for anything but an answer with status 200."""
        timeout_s = min(CALL_S, max(deadline - time.monotonic(), 0.1))
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


Value = TypeVar("Value")


class JudgeOfProcess:
    """The store and the connections of one process. A fork makes connections of its own."""

    def __init__(self, options: JudgeOptions, url: str, read: Callable[[httpx2.Response], JudgeReply]) -> None:
        self.options, self._url, self._read_reply = options, url, read
        self.store = JudgeStore(Path(options.folder or tempfile.mkdtemp(prefix="areal-bus-judge-")))
        self._connect()

    def _connect(self) -> None:
        self._client, self._pid = JudgeClient(self.options, self.store, self._url, self._read_reply), os.getpid()

    def asked(self, body: dict[str, Any], parse: Callable[[JudgeReply], Value]) -> Value:
        """`parse` of the reply, kept once parsed: the same body is sent once. Raises as `ask` or `parse` does."""
        deadline = time.monotonic() + self.options.score_s
        if self._pid != os.getpid():
            self._connect()
        key = hashlib.sha256(json.dumps([self.options.url, body], sort_keys=True).encode()).hexdigest()
        kept = self.store.reply(key)
        reply = self._client.ask(body, deadline=deadline) if kept is None else JudgeReply(kept, 0)
        value = parse(reply)
        if kept is None:
            self.store.keep(key, reply.text)
        return value


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


OURS = ("prompt", "completion", "max_score")  # fields of the template that are not of the row
GRADE = re.compile(  # a line or a sentence of its own: **Score:** 7.5/10
    r"(?:^|[.!?:;])[\s*_#>`-]*(?:(?:final|overall|total)[\s*_]+)?score\b[\s*_]*[:=][\s*_]*(?P<grade>-?[0-9]+(?:\.[0-9]+)?)"
    r"(?:[\s*_]*(?:/|out\s+of)[\s*_]*(?P<most>[0-9]+(?:\.[0-9]+)?))?(?:\s+points?)?[\s*_.`]*$",
    re.IGNORECASE,
)
ANOTHER = re.compile(r"\bscore\b[\s*_]*[:=][\s*_]*(?P<grade>-?[0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)
SUMMING = re.compile(r"\b(?:final|overall|total)[\s*_]+score\b", re.IGNORECASE)  # after grades of parts
LAST_LINE = 200  # characters at the end of the last line that are read
TEXT = 300  # characters of a reply in an error


_options: JudgeOptions | None = None
_judge: JudgeOfProcess | None = None  # made by the first score


def configure(options: JudgeOptions, fields: Collection[str] | None = None) -> None:
    """Set the process's options. `fields`: of every row. Raises ConfigError for unknown fields, or a missing key."""
    global _options, _judge
    known = None if fields is None else {*fields, *OURS}
    missing = [name for name in names_of(options.prompt) if known is not None and name not in known]
    if missing:
        raise ConfigError(
            f"unknown field {missing[0]} in reward.judge.prompt: it may use {', '.join(OURS)} and the fields of "
            "every row"
        )
    check_key(options)
    _options, _judge = options, None


def check_key(options: JudgeOptions) -> None:
    """Raises ConfigError where the environment lacks the key."""
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(
            f"reward.judge.api_key_env names the environment variable with the key: {options.api_key_env} is not set"
        )


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """The judge's score, divided by the largest one. Raises for a judge that gives none: never a 0."""
    judge = judge_of_process()
    options = judge.options
    fields = {**row, "prompt": prompt, "completion": completion, "max_score": f"{options.max_score:g}"}
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": options.prompt.format_map(fields)}],
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    reward = judge.asked(body, lambda reply: grade_of(whole(reply, options), options.max_score)) / options.max_score
    return Score(reward, None if options.correct_from is None else reward >= options.correct_from)


def whole(reply: JudgeReply, options: JudgeOptions) -> str:
    """The text. Raises ValueError for a reply that the server has cut."""
    if reply.is_cut:
        raise ValueError(
            f"the reply of the judge was cut after reward.judge.max_tokens = {options.max_tokens} tokens: it has no "
            "grade; set it higher"
        )
    return reply.text


def judge_of_process() -> JudgeOfProcess:
    global _judge
    if _options is None:
        raise RuntimeError("the reward judge must be configured: it has no URL")
    if _judge is None:
        _judge = JudgeOfProcess(_options, f"{_options.url.rstrip('/')}/chat/completions", read)
    return _judge


def grade_of(reply: str, max_score: float) -> float:
    """The "Score: N" or "Score: N/M" that ends a reply. Raises ValueError without one in range on its own line."""
    *before, last = reply.rstrip().split("\n")
    found = GRADE.search(last[-LAST_LINE:])
    if not found or (found["most"] and float(found["most"]) != max_score):
        raise ValueError(f'the reply of the judge must end with "Score: N": it ends with {reply[-TEXT:]!r}')
    grade = float(found["grade"])
    others = [float(own["grade"]) for line in before if (own := GRADE.match(line[:LAST_LINE]))]
    if not SUMMING.search(found[0]):
        others += [float(one["grade"]) for one in ANOTHER.finditer(last[-LAST_LINE:][: found.start()])]
    if found.start() and others and others[-1] != grade:
        raise ValueError(f"the reply of the judge has two grades, {others[-1]:g} and {grade:g}: {reply[-TEXT:]!r}")
    if not 0 <= grade <= max_score:
        raise ValueError(f"the judge's score must be from 0 to reward.judge.max_score = {max_score:g}: it is {grade:g}")
    return grade


def names_of(template: str) -> list[str]:
    """The fields that a template uses. Raises ValueError for a template that cannot be read."""
    return [
        re.split(r"[.\[]", name, maxsplit=1)[0] for _, name, _, _ in Formatter().parse(template) if name is not None
    ]
