"""The reward "reasoning_gym": 1 if the task's scorer gives a full score, else 0 (raw: part "score")."""

import json
import re
from collections.abc import Mapping
from typing import Any

import reasoning_gym  # noqa: F401  here, because the deadline of the first score is too short for it

from actors.data.tasks import SOURCE, data_set
from actors.rewards.protocol import Score

TUPLES = ("arc_agi", "rearc")  # their scorers compare tuples, which a row has as lists
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)


def score(prompt: str, completion: str, row: Mapping[str, Any]) -> Score:
    """Raises what the scorer raises."""
    source = row[SOURCE]
    problems = data_set(source["task"], json.dumps(source["options"], sort_keys=True))
    entry = {"question": row["question"], "answer": row["answer"], "metadata": metadata_of(source["task"], row)}
    raw = float(problems.score_answer(answer_of(completion), entry))
    is_right = raw >= 1.0
    return Score(float(is_right), is_right, {"score": min(max(raw, 0.0), 1.0)})


def metadata_of(task: str, row: Mapping[str, Any]) -> Any:
    return {name: as_tuple(value) for name, value in row["metadata"].items()} if task in TUPLES else row["metadata"]


def as_tuple(value: Any) -> Any:
    """A list as a tuple, to any depth."""
    return tuple(map(as_tuple, value)) if isinstance(value, list) else value


def answer_of(completion: str) -> str:
    """The text in the last <answer> marks, else the whole completion; without space at its ends."""
    found = ANSWER.findall(completion)
    return (found[-1] if found else completion).strip()
