"""Scores the gold answers of a named task's file, and other rows' answers: `python -m actors.offline.check_task`.

Reads a TaskCheckOrder as one JSON line; `tools/tasks.py` is its command line.
"""

import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actors.data.loading import load_rows
from actors.rewards.loading import load_reward, reward_options
from actors.rewards.values import read_value
from actors.runtime.process import leave
from areal_bus.config.named_tasks import NAMED_TASKS, fill
from areal_bus.config.reasoning_gym import task_of
from areal_bus.config.sections import Config
from areal_bus.errors import ArealBusError, ConfigError

SHOW_S = 5.0  # interval between two lines of progress
N_GENERATED = 50  # problems of a generated task, without a limit
NONSENSE = ("", "wrong zzz", "I do not know.", "[]", "-1 -1 -1")  # no task's answer
MAX_NAMED = 5  # rows that the report names

Row = dict[str, Any]
Score = Callable[[str, Row], bool | None]  # completion, row -> right; None: the reward failed


@dataclass(frozen=True, slots=True)
class TaskCheckOrder:
    """A task and its file."""

    task: str
    data: str  # JSON-lines file, or a Hugging Face data set; "": the task's own
    limit: int | None
    json: bool


def check_task(order: TaskCheckOrder, show: Callable[[int, int], None]) -> dict[str, Any]:
    """Counts over the rows. Raises ConfigError for a file that is not of the task."""
    config = configure(order)
    rows = load_rows(config, Path.cwd())
    score = scorer(config)
    gold_wrong: list[int] = []
    wrong_right: list[int] = []
    nonsense_right = [index for index, row in enumerate(rows) if any(score(text, row) for text in NONSENSE)]
    golden = [index for index, row in enumerate(rows) if has_gold(order.task, row)]
    for done, index in enumerate(golden):
        row = rows[index]
        if not all(score(form, row) for form in forms(order.task, row)):
            gold_wrong.append(index)
        other = other_answer(order.task, rows, golden, done)
        if other is not None and score(forms(order.task, other)[0], row):
            wrong_right.append(index)
        show(done + 1, len(golden))
    return {
        "task": order.task,
        "n": len(rows),
        "n_gold": len(golden),
        "gold_right": len(golden) - len(gold_wrong),
        "wrong_right": len(wrong_right),
        "nonsense_right": len(nonsense_right),
        "gold_wrong_rows": gold_wrong[:MAX_NAMED],
        "wrong_right_rows": wrong_right[:MAX_NAMED],
    }


def configure(order: TaskCheckOrder) -> Config:
    tree: dict[str, Any] = {"data": {"task": order.task, "limit": order.limit}}
    if task_of(order.task):
        tree["data"] |= {"size": order.limit or N_GENERATED, "held_out": 0}
    if order.data:
        tree["data"]["path"] = order.data
    fill(tree)
    config = Config.model_validate(tree)
    if not config.data.path and not config.data.is_generated:
        raise ConfigError(f"the task {order.task} has no Hugging Face id here: give its file with --data FILE")
    return config


def scorer(config: Config) -> Score:
    """The task's own reward: whether an answer is right."""
    function = load_reward(config.reward.function, Path.cwd(), options=reward_options(config.reward))

    def score(completion: str, row: Row) -> bool | None:
        try:
            return bool(read_value(function(row["question"], completion, row))["correct"])
        except Exception as error:  # noqa: BLE001  an error is no verdict; it is shown
            print(f"no score: {type(error).__name__}: {error}", file=sys.stderr)
            return None

    return score


def has_gold(task: str, row: Row) -> bool:
    """Whether the answer is a solution: some sets of code publish none."""
    if task == "codecontests":
        return bool(row["answer"] != row["name"])
    if task_of(task):
        return bool(row["answer"])
    return task not in ("livecodebench", "codeforces")


def forms(task: str, row: Row) -> list[str]:
    """The gold answer as a model would write it; the first form is the usual one."""
    answer = str(row["answer"])
    if task_of(task):
        return [f"I think so.\n<answer>{answer}</answer>", answer]
    if NAMED_TASKS[task].reward == "math":
        return [f"So the final answer is \\boxed{{{answer}}}.", f"Therefore, the final answer is ${answer}$."]
    program = row["prompt"] + answer if task == "humaneval" else answer
    return [f"Here it is:\n```python\n{program}\n```\n", answer]


def other_answer(task: str, rows: Sequence[Row], golden: Sequence[int], at: int) -> Row | None:
    """The next row with another answer; None if all are the same."""
    here = rows[golden[at]]
    later = (rows[index] for index in [*golden[at + 1 :], *golden[:at]])
    return next((row for row in later if plain(row["answer"]) != plain(here["answer"])), None)


def plain(answer: str) -> str:
    """To tell answers apart: "x = 5" and "5" are the same."""
    return re.sub(r"^[a-z]=", "", "".join(answer.split()).lower())


def report(found: dict[str, Any], seconds: float) -> Iterator[str]:
    n = found["n_gold"]
    yield f"{found['task']}: {found['n']} rows, {n} with a gold answer, {seconds:.0f} s"
    if not n:
        yield "no row has a solution: its tests were read, and only nonsense was scored"
        yield f"nonsense right       {found['nonsense_right']} of {found['n']}"
        return
    yield f"gold answers right   {found['gold_right']} of {n}" + named(found["gold_wrong_rows"], "wrong")
    yield f"other answers right  {found['wrong_right']} of {n}" + named(found["wrong_right_rows"], "right")
    yield f"nonsense right       {found['nonsense_right']} of {found['n']}"


def named(rows: Sequence[int], what: str) -> str:
    return f" ({what}: row {', '.join(map(str, rows))}{', ...' if len(rows) == MAX_NAMED else ''})" if rows else ""


class TaskProgress:
    """Prints progress to standard error."""

    def __init__(self) -> None:
        self._shown = time.monotonic()

    def show(self, n: int, n_all: int) -> None:
        if time.monotonic() - self._shown >= SHOW_S:
            self._shown = time.monotonic()
            print(f"{n} of {n_all} rows", file=sys.stderr, flush=True)


def main() -> int:
    order = TaskCheckOrder(**json.loads(sys.stdin.readline()))
    began = time.monotonic()
    try:
        found = check_task(order, TaskProgress().show)
    except ArealBusError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    seconds = time.monotonic() - began
    for line in report(found, seconds):
        print(line, file=sys.stderr if order.json else sys.stdout)
    if order.json:
        print(json.dumps(found | {"seconds": round(seconds, 2)}))
    return 0


if __name__ == "__main__":
    leave(main())
