"""Settings of the rows: [data], its sources and its curriculum."""

import re
from collections.abc import Collection
from pathlib import PurePath
from typing import Literal

from pydantic import Field

from areal_bus.config.names.named_tasks import gym_task, is_generated
from areal_bus.config.section import Section


class CurriculumConfig(Section):
    low: float = Field(0.0, ge=0, le=1)
    """A row whose last group has a pass rate of at most this comes in one of four passes."""
    high: float = Field(1.0, ge=0, le=1)
    """A row whose last group has a pass rate of at least this comes in one of four passes."""


class SourceConfig(Section):
    weight: float = 0.0
    """Share of the prompts, above 0 and needed: only the ratios of the weights count."""
    name: str = ""
    """Name in the journal and the evaluations; empty: that of the task, of the file, or of the function."""
    path: str = ""
    """As data.path."""
    task: str = ""
    """As data.task: a named task, which fills in path, split, prompt and reward; or a generated one."""
    function: str = ""
    """As data.function."""
    reward: str = ""
    """As reward.function, for the rows of this source; empty: reward.function."""
    prompt: str | None = None
    """As data.prompt."""
    split: str | None = None
    """As data.split."""
    question_key: str | None = None
    """As data.question_key."""
    answer_key: str | None = None
    """As data.answer_key."""
    task_options: dict[str, bool | int | float | str] | None = None
    """As data.task_options."""
    size: int | None = Field(None, ge=1)
    """As data.size."""
    limit: int | None = Field(None, ge=1)
    """As data.limit."""
    largest: int | None = Field(None, ge=1)
    """As data.largest."""
    held_out: int | None = Field(None, ge=0)
    """As data.held_out."""
    evaluate_path: str = ""
    """File of problems, evaluated as a set of this name with this prompt and reward; empty: the held-out problems of a
    generated task."""

    @property
    def label(self) -> str:
        """The name, given or derived."""
        return self.name or self.task.rpartition(":")[2] or PurePath(self.path).stem or self.function.rpartition(":")[2]


OF_A_SOURCE = {
    "path",
    "task",
    "function",
    "prompt",
    "split",
    "question_key",
    "answer_key",
    "task_options",
    "size",
    "limit",
    "largest",
    "held_out",
}


class DataConfig(Section):
    task: str = ""
    """A named task ("gsm8k", "humaneval", ...: docs/tasks.md), which fills in the keys that are not set; or a generated
    one instead of a file: "sums" (a + b), "reverse" (reverse the letters) or "reasoning-gym:NAME"."""
    task_options: dict[str, bool | int | float | str] = Field({})
    """Options of a task of reasoning-gym, for example { max_terms = 2 }."""
    size: int = Field(2000, ge=1)
    """Tasks of reasoning-gym: problems generated for training. Those that are held out are removed from them."""
    path: str = ""
    """File (.jsonl, .json, .csv, .parquet) or folder of datasets.save_to_disk, relative to the folder of the config or
    the working directory; or Hugging Face data set id."""
    function: str = ""
    """A loader of your own instead of a file: "module:factory" beside the config. The factory gets the config and
    returns a StatefulDataLoader of torchdata (extra "data") that yields rows (docs/data.md)."""
    source: tuple[SourceConfig, ...] = ()
    """Several sources instead of one, each a table [[data.source]] with a weight, and a path, task or function
    (docs/data.md). Keys that a source does not set are those of [data]."""
    curriculum: CurriculumConfig | None = None
    """Visit rows less often that the policy always or never solves: add [data.curriculum]."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    question_key: str = "question"
    """Field with the question: text or chat messages. Nested fields: "extra_info.question"."""
    answer_key: str = "answer"
    """Field with the answer. Nested fields: "reward_model.ground_truth"."""
    prompt: str = "{question}"
    """Template of the prompt. {question} and other fields of the row are filled in."""
    chat_template: bool = True
    """Format the prompt as a user message with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field({})
    """Arguments of the chat template, for example { enable_thinking = false } of Qwen3."""
    system: str | None = None
    """System message; empty string: none; unset: the default of the chat template."""
    batch_size: int = Field(8, ge=1)
    """B: prompts (groups) per batch."""
    total_train_epochs: int | None = Field(None, ge=1)
    """Passes through the data after which the run ends, unless total_train_steps ends it first. Unset: no limit."""
    max_refill: int = Field(0, ge=0)
    """Dynamic sampling (DAPO): groups without signal (equal rewards) that new prompts replace, at most, for a batch.
    0: such groups stay in the batch and are skipped."""
    drop_last: bool = False
    """At the end of the last pass: refund a remainder below B instead of training a short batch."""
    shuffle: bool = True
    """Shuffle each pass with a new seeded order."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer rows are refused at the start; longer prompts of a custom workflow are refunded. None is truncated."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """drop: rows over max_prompt_tokens do not end the start. They are counted and named there, keep their place in the
    order, and their prompts are refunded untrained."""
    largest: int = Field(9, ge=1)
    """Task "sums": largest summand (from 0). Task "reverse": maximum number of letters (from 3)."""
    held_out: int = Field(20, ge=0)
    """Generated tasks: problems held out for evaluation. Both orders of a sum are held out together."""

    @property
    def is_generated(self) -> bool:
        """Whether the rows come from code, instead of a file."""
        return is_generated(self.task)

    @property
    def parts(self) -> tuple[tuple[str, "DataConfig"], ...]:
        """Name and settings of each source; one without a name where there is no [[data.source]]."""
        return tuple((source.label, self.of(source.label)) for source in self.source) or (("", self),)

    @property
    def evaluated(self) -> tuple[str, ...]:
        """Names of the sources that bring problems of their own, which are evaluated as a set of that name."""
        own = {name: part.is_generated and part.held_out > 0 for name, part in self.parts}
        return tuple(source.label for source in self.source if source.evaluate_path or own[source.label])

    def of(self, name: str) -> "DataConfig":
        """The settings of a source by name; these for a row of none."""
        source = next((one for one in self.source if one.label == name), None)
        if source is None:
            return self
        own = source.model_dump(include=OF_A_SOURCE, exclude_none=True)
        return self.model_copy(update={**own, "source": ()})


NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # also a part of file names and of journal fields
KINDS = ("path", "task", "function")

Rule = tuple[bool, str]  # (whether it is violated, error text)


def data_rules(data: DataConfig, sets: Collection[str]) -> list[Rule]:
    """`sets`: the names in [[evaluate.sets]]."""
    given = [key for key in KINDS if getattr(data, key)]
    return [
        *(_several(data, given, sets) if data.source else _single(data, given)),
        *_options(data),
        *_curriculum(data),
    ]


def _single(data: DataConfig, given: list[str]) -> list[Rule]:
    return [
        (not given, 'data is needed: set data.path, or data.task = "sums"'),
        (
            given == ["task"] and not data.is_generated,
            f"data.task = {data.task!r} has no Hugging Face id here: set data.path to its file",
        ),
        (data.is_generated and bool(data.path), "one data source only: remove data.task or data.path"),
        (bool(data.function) and len(given) > 1, "one data source only: remove data.function, or the other one"),
    ]


def _several(data: DataConfig, given: list[str], sets: Collection[str]) -> list[Rule]:
    labels = [source.label for source in data.source]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    both = sorted(set(labels) & set(sets))
    return [
        (bool(given), f"one source in [data], or several in [[data.source]]: remove {given} of [data], or the tables"),
        *(rule for number, source in enumerate(data.source, start=1) for rule in _source(source, number)),
        (bool(twice), f"each [[data.source]] needs a name of its own: set name where {twice} occurs again"),
        (bool(both), f"a source and a set of [[evaluate.sets]] need different names: {both} is the name of both"),
    ]


def _source(source: SourceConfig, number: int) -> list[Rule]:
    which = repr(source.label) if source.label else f"number {number}"
    given = [key for key in KINDS if getattr(source, key)]
    is_named = given == ["path", "task"] and not DataConfig(task=source.task).is_generated
    found = f"has {' and '.join(given)}" if given else "has none of them"
    return [
        (
            len(given) != 1 and not is_named,
            f"each [[data.source]] needs one of path, task and function: source {which} {found}",
        ),
        (
            source.weight <= 0,
            f"each [[data.source]] needs a weight above 0, its share of the prompts: that of source {which} is "
            f"{source.weight:g}",
        ),
        (
            bool(source.label) and not NAME.fullmatch(source.label),
            f"the name of a [[data.source]] has up to 64 letters, digits and . _ -: set name for source {which}",
        ),
    ]


def _options(data: DataConfig) -> list[Rule]:
    wrong = [part.task for _, part in data.parts if part.task_options and not gym_task(part.task)]
    return [
        (
            bool(wrong),
            f'data.task_options are for data.task = "reasoning-gym:NAME": it is {wrong and wrong[0]!r}',
        )
    ]


def _curriculum(data: DataConfig) -> list[Rule]:
    window = data.curriculum
    if window is None:
        return []
    return [
        (
            window.low >= window.high,
            f"data.curriculum.low ({window.low:g}) must be below data.curriculum.high ({window.high:g})",
        ),
        (
            all(part.function for _, part in data.parts),
            "data.curriculum is for rows that are read: a loader decides its order itself; remove [data.curriculum]",
        ),
    ]
