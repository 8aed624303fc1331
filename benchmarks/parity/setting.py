"""The tasks of the bench `parity` for both sides: model, prompts, reward, loss, optimizer.

Standard library only, so that every side's interpreter can import it. Rewards are named "module:function": both sides
call the same one.
"""

import importlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

BETAS, EPS, DECAY = (0.9, 0.95), 1e-8, 0.0  # AdamW, constant rate, no warm-up
CLIP_NORM, CLIP_RATIO, STD_EPS = 1.0, 0.2, 1e-4  # TRL adds 1e-4 to a group's deviation
ANSWERS = 4  # of a held-out problem, sampled at temperature 1


@dataclass(frozen=True, slots=True)
class Task:
    """One model and its problems."""

    name: str
    template: str  # of the prompt, with fields of a row
    reward: str  # "module:function", called as (prompt, completion, row)
    ours: str  # reward.function of the same reward
    groups: int  # prompts of an update
    samples: int  # completions of a prompt
    n_new: int  # tokens of a completion, at most
    lr: float
    updates: int
    seeds: int

    @property
    def batch(self) -> int:
        """Completions of an update."""
        return self.groups * self.samples


SUMS = Task(
    name="sums",
    template="<|im_start|>user\nWhat is {a}+{b}? Reply with just the number.<|im_end|>\n<|im_start|>assistant\n",
    reward="actors.rewards.functions.builtin:sums_score",
    ours="sums",
    groups=4,
    samples=8,
    n_new=8,
    lr=2e-5,
    updates=20,
    seeds=5,
)
SPELL = Task(
    name="spell_backward",
    template="{question}>",
    reward="actors.rewards.functions.reasoning:score",
    ours="reasoning_gym",
    groups=16,
    samples=8,
    n_new=10,
    lr=4e-4,
    updates=100,
    seeds=5,
)
TASKS = {task.name: task for task in (SUMS, SPELL)}
CHARACTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ():->.'"  # of the model of SPELL


def read(path: str) -> list[Row]:
    """The rows of a JSON lines file; "text" is the prompt."""
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def reward_of(task: Task) -> Callable[[str, str, Mapping[str, Any]], Any]:
    module, _, name = task.reward.partition(":")
    found: Callable[[str, str, Mapping[str, Any]], Any] = getattr(importlib.import_module(module), name)
    return found
