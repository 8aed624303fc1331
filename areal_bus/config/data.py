"""Settings of the rows: [data], its sources and its curriculum."""

import re
from collections.abc import Collection, Iterator
from pathlib import PurePath
from typing import Any, Literal

from pydantic import Field

from areal_bus.config.names.named_tasks import gym_task, is_generated
from areal_bus.config.rollout import MOST_PENALTY, MOST_RATE, MOST_TOP_K
from areal_bus.config.section import Section


class CurriculumConfig(Section):
    low: float = Field(0.0, ge=0, le=1)
    """Rows with a last pass rate of at most this come in one of four passes."""
    high: float = Field(1.0, ge=0, le=1)
    """Rows with a last pass rate of at least this, likewise."""


class OwnGeneration(Section):
    """The keys of [gconfig], of which a source or a set of an evaluation sets its own; its values have their bounds."""

    n_samples: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MOST_TOP_K)
    min_p: float | None = Field(None, ge=0, le=1)
    min_new_tokens: int | None = Field(None, ge=0)
    repetition_penalty: float | None = Field(None, ge=1 / MOST_RATE, le=MOST_RATE)
    presence_penalty: float | None = Field(None, ge=-MOST_PENALTY, le=MOST_PENALTY)
    frequency_penalty: float | None = Field(None, ge=-MOST_PENALTY, le=MOST_PENALTY)
    logit_bias: dict[int, float] | None = None
    stop: tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None

    @property
    def own(self) -> dict[str, Any]:
        """The keys that are set."""
        found = {name: getattr(self, name) for name in OwnGeneration.model_fields}
        return {name: value for name, value in found.items() if value is not None}


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
    workflow: str = ""
    """As workflow.function, for these rows: "single_turn" or "module:Class"; empty: workflow.function."""
    truncated_samples: Literal["train", "mask", "zero"] | None = None
    """As actor.truncated_samples."""
    mask_repetition: float | None = Field(None, gt=0, le=1)
    """As actor.mask_repetition; 1: none."""
    normalize_with: str = ""
    """Advantages are normalised over the batch with those of sources that have the same name here."""
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
    gconfig: OwnGeneration = OwnGeneration()
    """Keys of [gconfig] for this source; unset: as there."""
    evaluate: OwnGeneration = OwnGeneration()
    """The same keys for its problems; unset: docs/evaluation.md."""

    @property
    def label(self) -> str:
        return self.name or self.task.rpartition(":")[2] or PurePath(self.path).stem or self.function.rpartition(":")[2]


class DataConfig(Section):
    task: str = ""
    """A named task ("gsm8k", ...: docs/tasks.md), which sets unset keys; or a generated one: "sums", "reverse",
    "reasoning-gym:NAME"."""
    task_options: dict[str, bool | int | float | str] = Field({})
    """Options of a reasoning-gym task: { max_terms = 2 }."""
    size: int = Field(2000, ge=1)
    """Problems of a reasoning-gym task to train."""
    path: str = ""
    """File (.jsonl, .json, .csv, .parquet), folder of datasets.save_to_disk, or Hugging Face id."""
    function: str = ""
    """Your loader, "module:factory": it returns a StatefulDataLoader (docs/data.md)."""
    source: tuple[SourceConfig, ...] = ()
    """Several sources by weight, tables [[data.source]] (docs/data.md)."""
    curriculum: CurriculumConfig | None = None
    """Visit rows less often that the policy always or never solves: add [data.curriculum]."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    question_key: str = "question"
    """Field with the question, text or chat messages; nested: "extra_info.question"."""
    answer_key: str = "answer"
    """Field with the answer; nested: "reward_model.ground_truth"."""
    prompt: str = "{question}"
    """Template of the prompt, with fields of the row."""
    chat_template: bool = True
    """Format the prompt with the tokenizer's chat template."""
    chat_template_kwargs: dict[str, bool | int | float | str] = Field({})
    """Arguments of the chat template: { enable_thinking = false }."""
    system: str | None = None
    """System message; unset: the template's default."""
    batch_size: int = Field(8, ge=1)
    """B: prompts (groups) per batch."""
    total_train_epochs: int | None = Field(None, ge=1)
    """Passes through the data that end the run."""
    max_refill: int = Field(0, ge=0)
    """Most groups of equal rewards per batch that new prompts replace (DAPO); 0: they are skipped."""
    drop_last: bool = False
    """Refund a last remainder below B instead of training it."""
    shuffle: bool = True
    """A new seeded order for each pass."""
    limit: int | None = Field(None, ge=1)
    """Use only the first rows."""
    max_prompt_tokens: int = Field(512, ge=1)
    """Longer rows are refused at the start, longer prompts of a workflow refunded."""
    long_prompts: Literal["refuse", "drop"] = "refuse"
    """"drop": longer rows are named at the start and not trained."""
    largest: int = Field(9, ge=1)
    """"sums": largest summand; "reverse": most letters."""
    held_out: int = Field(20, ge=0)
    """Generated tasks: problems held out for evaluation."""

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

    def source_named(self, name: str) -> SourceConfig | None:
        return next((one for one in self.source if one.label == name), None)

    def of(self, name: str) -> "DataConfig":
        """The settings of a source by name; these for a row of none."""
        source = self.source_named(name)
        if source is None:
            return self
        shared = SourceConfig.model_fields.keys() & DataConfig.model_fields.keys()
        own = source.model_dump(include=set(shared), exclude_none=True)
        return self.model_copy(update={**own, "source": ()})


NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")  # also a part of file names and of journal fields
KINDS = ("path", "task", "function")


def data_rules(data: DataConfig, sets: Collection[str]) -> Iterator[str]:
    """`sets`: the names in [[evaluate.sets]]."""
    given = [key for key in KINDS if getattr(data, key)]
    yield from _several(data, given, sets) if data.source else _single(data, given)
    yield from _options(data)
    yield from _curriculum(data)


def _single(data: DataConfig, given: list[str]) -> Iterator[str]:
    if not given:
        yield 'data is needed: set data.path, or data.task = "sums"'
    if given == ["task"] and not data.is_generated:
        yield f"data.task = {data.task!r} has no Hugging Face id here: set data.path to its file"
    if data.is_generated and data.path:
        yield "one data source only: remove data.task or data.path"
    if data.function and len(given) > 1:
        yield "one data source only: remove data.function, or the other one"


def _several(data: DataConfig, given: list[str], sets: Collection[str]) -> Iterator[str]:
    labels = [source.label for source in data.source]
    twice = sorted({label for label in labels if labels.count(label) > 1})
    both = sorted(set(labels) & set(sets))
    if given:
        yield f"one source in [data], or several in [[data.source]]: remove {given} of [data], or the tables"
    for number, source in enumerate(data.source, start=1):
        yield from _source(source, number)
    if twice:
        yield f"duplicate name of [[data.source]]: {twice}; set name"
    if both:
        yield f"a source and a set of [[evaluate.sets]] need different names: {both} is the name of both"


def _source(source: SourceConfig, number: int) -> Iterator[str]:
    which = repr(source.label) if source.label else f"number {number}"
    given = [key for key in KINDS if getattr(source, key)]
    is_named = given == ["path", "task"] and not DataConfig(task=source.task).is_generated
    found = f"has {' and '.join(given)}" if given else "has none of them"
    if len(given) != 1 and not is_named:
        yield f"each [[data.source]] needs one of path, task and function: source {which} {found}"
    if source.weight <= 0:
        share = f"that of source {which} is {source.weight:g}"
        yield f"each [[data.source]] needs a weight above 0, its share of the prompts: {share}"
    if source.label and not NAME.fullmatch(source.label):
        yield f"the name of a [[data.source]] has up to 64 letters, digits and . _ -: set name for source {which}"


def _options(data: DataConfig) -> Iterator[str]:
    wrong = [part.task for _, part in data.parts if part.task_options and not gym_task(part.task)]
    if wrong:
        yield f'data.task_options are for data.task = "reasoning-gym:NAME": it is {wrong[0]!r}'


def _curriculum(data: DataConfig) -> Iterator[str]:
    window = data.curriculum
    if window is None:
        return
    if window.low >= window.high:
        yield f"data.curriculum.low ({window.low:g}) must be below data.curriculum.high ({window.high:g})"
    if all(part.function for _, part in data.parts):
        yield "data.curriculum is for rows that are read: a loader decides its order itself; remove [data.curriculum]"
