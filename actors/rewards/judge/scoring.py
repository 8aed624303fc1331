"""Grades a completion: fills the judge's prompt, and reads the score that ends its reply."""

import hashlib
import json
import os
import re
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from actors.rewards.judge.client import JudgeClient, JudgeOptions, JudgeReply, JudgeStore
from actors.rewards.protocol import Score
from areal_bus.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class Judge:
    """The judge of the process `pid`."""

    options: JudgeOptions
    store: JudgeStore
    client: JudgeClient
    pid: int


_options: JudgeOptions | None = None
_judge: Judge | None = None  # made by the first score


def configure(options: JudgeOptions, fields: Collection[str] | None = None) -> None:
    """Set the options of this process. `fields`: those that every row has, if known.

    Raises ConfigError for a prompt with other fields, or a missing key.
    """
    global _options, _judge
    known = None if fields is None else {*fields, *OURS}
    missing = [name for name in names_of(options.prompt) if known is not None and name not in known]
    if missing:
        raise ConfigError(
            f"unknown field {missing[0]} in reward.judge.prompt: it may use {', '.join(OURS)} and the fields of "
            "every row"
        )
    if options.api_key_env and not os.environ.get(options.api_key_env):
        raise ConfigError(
            f"reward.judge.api_key_env names the environment variable with the key: {options.api_key_env} is not set"
        )
    _options, _judge = options, None


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """The judge's score, divided by the largest one. Raises for a judge that gives none: never a 0."""
    judge = judge_of_process()
    options = judge.options
    deadline = time.monotonic() + options.score_s
    fields = {**row, "prompt": prompt, "completion": completion, "max_score": f"{options.max_score:g}"}
    body = {
        "model": options.model,
        "messages": [{"role": "user", "content": options.prompt.format_map(fields)}],
        "temperature": options.temperature,
        "max_tokens": options.max_tokens,
    }
    key = hashlib.sha256(json.dumps([options.url, body], sort_keys=True).encode()).hexdigest()
    kept = judge.store.reply(key)
    reply = whole(judge.client.ask(body, deadline=deadline), options) if kept is None else kept
    reward = grade_of(reply, options.max_score) / options.max_score
    if kept is None:
        judge.store.keep(key, reply)  # only replies that can be read
    return Score(reward, None if options.correct_from is None else reward >= options.correct_from)


def whole(reply: JudgeReply, options: JudgeOptions) -> str:
    """The text. Raises ValueError for a reply that the server has cut."""
    if reply.is_cut:
        raise ValueError(
            f"the reply of the judge was cut after reward.judge.max_tokens = {options.max_tokens} tokens: it has no "
            "grade; set it higher"
        )
    return reply.text


def judge_of_process() -> Judge:
    """The judge. A fork gets connections of its own."""
    global _judge
    if _options is None:
        raise RuntimeError("the reward judge must be configured: it has no URL")
    if _judge is None or _judge.pid != os.getpid():
        store = JudgeStore(Path(_options.folder or tempfile.mkdtemp(prefix="areal-bus-judge-")))
        _judge = Judge(_options, store, JudgeClient(_options, store), os.getpid())
    return _judge


def grade_of(reply: str, max_score: float) -> float:
    """The "Score: N" that ends a reply, or "Score: N/M" where M is the largest. Raises ValueError without one, for one
    out of range, or for one within a sentence after another on a line of its own.
    """
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
