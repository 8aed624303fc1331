"""The program in the sandbox that holds a model's code: it answers calls of its functions with plain values.

Standard input has one call a line: [name, encoded arguments]; standard output one answer a line: {"value": encoded} or
{"error": text}. The model's code has neither: its own input is empty, and what it prints is dropped.
"""

import json
import os
import signal
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from areal_code.plain_values import decode, encode

ERROR_CHARACTERS = 300


def main(program: str, call_s: float) -> None:
    """`call_s`: seconds for the program's start, and for each call."""
    calls = os.fdopen(os.dup(0), encoding="utf-8")
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for file in (0, 1, 2):
        os.dup2(nowhere, file)
    sys.set_int_max_str_digits(0)
    signal.signal(signal.SIGALRM, _alarm)
    names: dict[str, Any] = {"__name__": "solution"}
    broken = limited(lambda: exec(compile(program, "solution.py", "exec"), names), call_s)
    for line in calls:
        name, arguments = json.loads(line)
        answer = broken if "error" in broken else limited(partial(call, names, name, arguments), call_s)
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def call(names: dict[str, Any], name: str, arguments: str) -> Any:
    return function(names, name)(*decode(arguments))


def limited(call: Callable[[], Any], seconds: float) -> dict[str, str]:
    """The encoded value of the call, or why there is none."""
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return {"value": encode(call())}
    except BaseException as error:  # noqa: BLE001  model-written code raises anything
        return {"error": f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """A function of the program, or a method of its class Solution."""
    if name not in names and "Solution" in names:
        return getattr(names["Solution"](), name)  # type: ignore[no-any-return]
    return names[name]  # type: ignore[no-any-return]


def _alarm(number: int, frame: Any) -> None:
    raise TimeoutError("the call took too long")
