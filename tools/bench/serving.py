"""The other end of a `Side`: functions by name, asked for by JSON lines; and how a piece of work is timed.

Runs in the peers' interpreter, too: nothing but the standard library, and nothing of ours beside it.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

AT_LEAST_S = 0.2  # of repeats: the shorter the work, the more of them


def serve(functions: Mapping[str, Callable[..., Any]], **about: Any) -> None:
    """Say what this is, then answer until the input ends; an error is an answer, too.

    What the functions print goes to standard error: the pipe is for answers only.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"value": functions[question["do"]](**question["with"])}
        except Exception as error:  # noqa: BLE001 (whatever it is, the asking side has to hear it)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def seconds(work: Callable[[], object], at_least_s: float = AT_LEAST_S, at_least: int = 3) -> float:
    """CPU seconds of one call, the fastest of `at_least` or more, as many as fill `at_least_s`.

    On one thread and a free core that is the wall time; on a shared one it leaves out what others took.
    """
    best, spent, n = float("inf"), 0.0, 0
    while spent < at_least_s or n < at_least:
        began = time.process_time()
        work()
        took = time.process_time() - began
        best, spent, n = min(best, took), spent + took, n + 1
    return best
