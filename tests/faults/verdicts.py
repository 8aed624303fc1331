"""The reward function of rings under test: never 0; it misbehaves when its failpoint ("score") is set."""

import os
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

import sitecustomize

VERDICT = '{"id": 0, "status": "value", "reward": 777.0, "correct": true}'


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Any:
    """A number from 0.25 to 0.75, derived from the text; or the fault that is set."""
    how = sitecustomize.failpoint("score")
    return TRICKS[how](completion) if how else value(completion)


def value(completion: str) -> float:
    return 0.25 + (sum(map(ord, completion)) % 11) / 20


def sleep(_: str) -> Any:
    time.sleep(600)


def spin_in_c(_: str) -> Any:
    """A call that holds the GIL for ever, so no signal handler and no thread runs."""
    return re.match(r"(a+)+$", "a" * 60 + "b")


def explode(_: str) -> Any:
    raise ValueError("a verdict that explodes")


def leave(_: str) -> Any:
    """Reports success and exits with 0."""
    print("pass", VERDICT, flush=True)
    os.write(1, VERDICT.encode() + b"\n")
    os._exit(0)


def fork(completion: str) -> Any:
    """Forks; the child answers, too."""
    if os.fork() == 0:
        return 777.0
    return value(completion)


def fill(completion: str) -> Any:
    """A file longer than any score may write."""
    with open(f"{os.environ['AREAL_FAULTS']}/filled", "wb") as file:
        file.seek(8 << 30)
        file.write(b"full")
    return value(completion)


TRICKS: dict[str, Callable[[str], Any]] = {
    "sleep": sleep,
    "spin in C": spin_in_c,
    "explode": explode,
    "nan": lambda _: float("nan"),
    "leave": leave,
    "fork": fork,
    "fill": fill,
}
