"""Worker side of a `Side`: serves named functions over JSON lines, and times pieces of work.

Also runs in the peers' interpreter: standard library only, no imports of our packages.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from statistics import median
from typing import Any

AT_LEAST_S = 0.2  # wall time of all repeats: shorter work is repeated more often
RUN_S = 1e-3


def serve(functions: Mapping[str, Callable[..., Any]], **about: Any) -> None:
    """Send `about`, then answer requests until the input ends. An error is sent as an answer.

    Output of the functions goes to standard error; the pipe carries answers only.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    print(json.dumps(about), file=answers)
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = {"value": functions[question["do"]](**question["with"])}
        except Exception as error:  # noqa: BLE001 (every error is reported to the requesting side)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers)


def seconds(work: Callable[[], object], at_least_s: float = AT_LEAST_S, at_least: int = 3) -> float:
    """CPU seconds of one call: the median of `at_least` runs or more, as many as fill `at_least_s`.

    On one thread and a free core that is the wall time; on a shared one it leaves out what others took. A run is as
    many calls as take RUN_S, and not the fastest run counts: in a virtual machine the CPU clock stands still for
    moments, while it makes up for time that the host took.
    """
    costs: list[float] = []
    n, spent = 1, 0.0
    while spent < at_least_s or len(costs) < at_least:
        wall, cpu = time.monotonic(), time.process_time()
        for _ in range(n):
            work()
        took = time.process_time() - cpu
        wall = time.monotonic() - wall
        spent += wall
        if wall < RUN_S and not costs:
            n *= 2
        else:
            costs.append(took / n)
    return median(costs)
