"""Scores the gold answers of a named task's file, and other rows' answers, for `tools/tasks.py`."""

import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from actors.data.loading import load_rows
from actors.rewards.binding.values import read_value
from actors.rewards.loading import load_reward, reward_options
from areal_bus.config.names.named_tasks import NAMED_TASKS, fill, gym_task
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

SHOW_S = 5.0  # interval between two lines of progress
N_GENERATED = 50  # problems of a generated task, without a limit
NONSENSE = ("", "wrong zzz", "I do not know.", "[]", "-1 -1 -1")  # no task's answer
N_NONSENSE_OF_CODE = 2  # of them: each costs the start of two processes
MAX_NAMED = 5  # rows that the report names

Row = dict[str, Any]
Score = Callable[[str, Row], bool | None]  # completion, row -> right; None: the reward failed


class Answers(NamedTuple):
    """The completions that a row's reward is tried with."""

    gold: Sequence[str]  # forms of its gold answer; empty if it has none
    nonsense: Sequence[str]
    other: str | None  # another row's gold answer


@dataclass(frozen=True, slots=True)
class CheckedRow:
    """What the reward says of a row's answers."""

    index: int
    has_gold: bool
    gold_right: bool
    wrong_right: bool
    nonsense_right: bool
    has_error: bool  # a score failed


def check_task(task: str, data: str, limit: int | None, show: Callable[[int, int], None]) -> dict[str, Any]:
    """Counts over the rows. `data`: a JSON-lines file or a Hugging Face data set; "": the task's own. Raises
    ConfigError for a file that is not of the task.
    """
    config = configure(task, data, limit)
    rows = load_rows(config, Path.cwd())
    score = scorer(config)
    golden = [index for index, row in enumerate(rows) if has_gold(task, row)]
    at = {index: place for place, index in enumerate(golden)}
    is_code = config.reward.function == "code"
    nonsense = NONSENSE[:N_NONSENSE_OF_CODE] if is_code else NONSENSE

    def check(index: int) -> CheckedRow:
        other = other_answer(task, rows, golden, at[index]) if index in at else None
        gold = forms(task, rows[index]) if index in at else ()
        answers = Answers(gold, nonsense, None if other is None else forms(task, other)[0])
        return check_row(rows[index], index, answers, score)

    checked = []
    with ThreadPoolExecutor(os.cpu_count() if is_code else 1) as threads:  # code runs in other processes
        for row in threads.map(check, range(len(rows))):
            checked.append(row)
            show(len(checked), len(rows))
    return counts(task, checked)


def check_row(row: Row, index: int, answers: Answers, score: Score) -> CheckedRow:
    gold = [score(form, row) for form in answers.gold]
    wrong = False if answers.other is None else score(answers.other, row)
    silly = [score(text, row) for text in answers.nonsense]
    return CheckedRow(index, bool(gold), all(gold), bool(wrong), any(silly), None in (*gold, wrong, *silly))


def counts(task: str, checked: Sequence[CheckedRow]) -> dict[str, Any]:
    golden = [row for row in checked if row.has_gold]
    wrong = [row.index for row in golden if not row.gold_right]
    right = [row.index for row in golden if row.wrong_right]
    errors = [row.index for row in checked if row.has_error]
    return {
        "task": task,
        "n": len(checked),
        "n_gold": len(golden),
        "gold_right": len(golden) - len(wrong),
        "wrong_right": len(right),
        "nonsense_right": sum(row.nonsense_right for row in checked),
        "n_errors": len(errors),
        "gold_wrong_rows": wrong[:MAX_NAMED],
        "wrong_right_rows": right[:MAX_NAMED],
        "error_rows": errors[:MAX_NAMED],
    }


def configure(task: str, data: str, limit: int | None) -> Config:
    tree: dict[str, Any] = {"data": {"task": task, "limit": limit}}
    if gym_task(task):
        tree["data"] |= {"size": limit or N_GENERATED, "held_out": 0}
    if data:
        tree["data"]["path"] = data
    fill(tree)
    config = Config.model_validate(tree)
    if not config.data.path and not config.data.is_generated:
        raise ConfigError(
            f"missing data of the task {task}, which has no Hugging Face id: give its file with --data FILE"
        )
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
    if gym_task(task):
        return bool(row["answer"])
    return task not in ("livecodebench", "codeforces")


def forms(task: str, row: Row) -> list[str]:
    """The gold answer as a model would write it; the first form is the usual one."""
    answer = str(row["answer"])
    if gym_task(task):
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
    if n:
        yield f"gold answers right   {found['gold_right']} of {n}" + named(found["gold_wrong_rows"], "wrong")
        yield f"other answers right  {found['wrong_right']} of {n}" + named(found["wrong_right_rows"], "right")
    else:
        yield "no row has a solution: its tests were read, and only nonsense was scored"
    yield f"nonsense right       {found['nonsense_right']} of {found['n']}"
    if found["n_errors"]:
        yield f"no score             {found['n_errors']} of {found['n']}" + named(
            found["error_rows"], "the reward failed"
        )


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


def run(task: str, data: str, limit: int | None, *, as_json: bool) -> int:
    """Check and print the counts; with `as_json` one JSON object on standard output. Returns the exit code."""
    began = time.monotonic()
    found = check_task(task, data, limit, TaskProgress().show)
    seconds = time.monotonic() - began
    for line in report(found, seconds):
        print(line, file=sys.stderr if as_json else sys.stdout)
    if as_json:
        print(json.dumps(found | {"seconds": round(seconds, 2)}))
    return 0
