"""An environment of the package verifiers, as one writes it for any trainer: words are to be written backwards.

configs/verifiers.toml trains on it. `kind` chooses one of three: "single_turn", "multi_turn" (a second try after a
wrong answer) and "tool" (the model may call `letters`).
"""

import random
import string
from typing import Any

import verifiers as vf
from datasets import Dataset


def make_rows(n_words: int, longest: int, seed: int) -> list[dict[str, Any]]:
    """Distinct words with their answers; `demonstration` is for the supervised warm-up of an untrained model."""
    random_ = random.Random(seed)
    words = {
        "".join(random_.choices(string.ascii_lowercase, k=random_.randint(3, longest))): None for _ in range(n_words)
    }
    return [{"question": word, "answer": word[::-1], "demonstration": word[::-1]} for word in words]


def right(completion: list[Any], answer: str) -> float:
    """1 if the last answer is right."""
    return float(completion[-1]["content"].strip() == answer)


def letters_in_place(completion: list[Any], answer: str) -> float:
    """Share of the letters that are right, of the longer one of both words."""
    given = completion[-1]["content"].strip()
    return sum(a == b for a, b in zip(answer, given, strict=False)) / max(len(answer), len(given))


class TwoTries(vf.MultiTurnEnv):
    """After a wrong answer the word is given once more."""

    async def env_response(self, messages: Any, state: vf.State, **kwargs: Any) -> Any:
        return [vf.UserMessage(content=state["prompt"][-1]["content"])]

    @vf.stop
    async def is_right(self, state: vf.State) -> bool:
        steps = state["trajectory"]
        return bool(steps) and steps[-1]["completion"][-1]["content"].strip() == state["answer"]


def letters(word: str) -> str:
    """The letters of a word, the last one first."""
    return " ".join(reversed(word))


def load_environment(kind: str = "single_turn", n_words: int = 2000, longest: int = 5, seed: int = 0) -> vf.Environment:
    rows = make_rows(n_words, longest, seed)
    parts = {
        "dataset": Dataset.from_list(rows[50:]),
        "eval_dataset": Dataset.from_list(rows[:50]),
        "rubric": vf.Rubric(funcs=[right, letters_in_place], weights=[0.5, 0.5]),
    }
    if kind == "multi_turn":
        return TwoTries(max_turns=2, **parts)
    if kind == "tool":
        return vf.ToolEnv(tools=[letters], max_turns=3, **parts)
    return vf.SingleTurnEnv(**parts)
