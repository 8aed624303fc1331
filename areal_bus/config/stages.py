"""Stages of a run, tables [[run.stage]]: their settings and rules, and the settings of each stage and source. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import Field

from areal_bus.config.section import Section

if TYPE_CHECKING:
    from areal_bus.config.rollout import GenerationConfig
    from areal_bus.config.sections import Config


class StageGeneration(Section):
    n_samples: int | None = Field(None, ge=1)
    max_new_tokens: int | None = Field(None, ge=1)


class StageLearner(Section):
    max_tokens_per_mb: int | None = Field(None, ge=1)


class StageConfig(Section):
    """A key that a stage does not set keeps its value of the stage before, or of its own section."""

    from_step: int = Field(ge=0)
    gconfig: StageGeneration = StageGeneration()
    learner: StageLearner = StageLearner()


FIRST = "before"  # an evaluation, for the settings of a set
OF_THE_TASK = ("max_new_tokens", "stop", "stop_token_ids")  # what ends an answer: alike in training and evaluation
KEYS = ("gconfig.n_samples", "gconfig.max_new_tokens", "learner.max_tokens_per_mb")  # that a stage may set


def settings_by_stage(config: Config) -> dict[int, Config]:
    """First version -> the settings from then on, without [[run.stage]]. Begins at 0; one entry without stages."""
    now = config.model_copy(update={"run": config.run.model_copy(update={"stage": ()})})
    found = {0: now}
    for stage in config.run.stage:
        now = with_values(now, values_of(stage))
        found[stage.from_step] = now
    return found


def sampling_of(config: Config, source: str, evaluation: str = "") -> GenerationConfig:
    """How the samples of a row are drawn: [gconfig] of this stage with the own keys of its source, which win.

    In an evaluation ("step-8:SET") n_samples and temperature are those of [evaluate], the limits and stops those of
    training, all else the model's own distribution, whatever training has; and the own keys of the set win.
    """
    name = evaluation.partition(":")[2] if evaluation else source
    found = config.data.source_named(name)
    own = found.gconfig.own if found is not None else {}
    trained = config.gconfig.model_copy(update=own) if own else config.gconfig
    if not evaluation:
        return trained
    plain = {"n_samples": config.evaluate.n_samples, "temperature": config.evaluate.temperature}
    ends = {key: getattr(trained, key) for key in OF_THE_TASK}
    return type(trained)().model_copy(update=ends | plain | own_of_set(config, name))


def own_of_set(config: Config, name: str) -> dict[str, Any]:
    """The keys of [gconfig] that a set of an evaluation sets itself: one of [[evaluate.sets]] or a source's."""
    source = config.data.source_named(name)
    if source is not None:
        return source.evaluate.own
    return next((problems.own for problems in config.evaluate.sets if problems.name == name), {})


def of_source(config: Config, source: str) -> Config:
    """The settings with [gconfig] as it is for the rows of a source."""
    return config.model_copy(update={"gconfig": sampling_of(config, source)})


def evaluations_of(config: Config) -> list[GenerationConfig]:
    """How each set that may be evaluated is sampled; none where evaluation is off."""
    return [sampling_of(config, "", f"{FIRST}:{name}") for name in names_of_sets(config)]


def names_of_sets(config: Config) -> list[str]:
    """Of all sets that are evaluated, "" for the problems of [evaluate] itself; none where evaluation is off."""
    names = ["", *(problems.name for problems in config.evaluate.sets), *config.data.evaluated]
    return names if config.evaluate.is_on else []


def samplings_of(config: Config) -> list[GenerationConfig]:
    """How anything is sampled: prompts of each stage and source, sets of evaluations."""
    evaluated = (one for stage in settings_by_stage(config).values() for one in evaluations_of(stage))
    return [*(one.gconfig for one in variants(config)), *evaluated]


def variants(config: Config) -> list[Config]:
    """The settings of each stage for each source: all that prompts are trained with."""
    stages = settings_by_stage(config).values()
    names = [source.label for source in config.data.source] or [""]
    return [of_source(stage, name) for stage in stages for name in names]


def has_one_limit(config: Config) -> bool:
    """Whether all stages, sources and sets of evaluations sample alike, except for temperature and group size."""
    alike = [one.model_copy(update={"n_samples": 1, "temperature": 1.0}) for one in samplings_of(config)]
    return all(one == alike[0] for one in alike)


def largest(config: Config) -> Config:
    """The settings with the largest value that any stage or source has of each key: the bound of what is fixed at the
    start. An evaluation's max_new_tokens count where it sets its own.
    """
    found = variants(config)
    values = {key: max(value_at(one, key) for one in found) for key in KEYS}
    own = (own_of_set(config, name).get("max_new_tokens", 0) for name in names_of_sets(config))
    values["gconfig.max_new_tokens"] = max(values["gconfig.max_new_tokens"], *own, 0)
    return config if config == (made := with_values(found[0], values)) else made


def smallest_group(config: Config) -> int:
    """The smallest gconfig.n_samples of all stages and sources."""
    return min(one.gconfig.n_samples for one in variants(config))


def values_of(stage: StageConfig) -> dict[str, int]:
    """Key -> value, of the keys that the stage sets."""
    found = {key: value_at(stage, key) for key in KEYS}
    return {key: value for key, value in found.items() if value is not None}


def value_at(settings: Config | StageConfig, key: str) -> int:
    section, _, name = key.partition(".")
    value: int = getattr(getattr(settings, section), name)
    return value


def with_values(config: Config, values: dict[str, int]) -> Config:
    """A copy with other values of these keys, unchecked."""
    for key, value in values.items():
        section, _, name = key.partition(".")
        inner = getattr(config, section).model_copy(update={name: value})
        config = config.model_copy(update={section: inner})
    return config


def stage_rules(config: Config) -> Iterator[str]:
    """Rules for the order of the stages. Each stage's settings pass all other rules, too (validation.py)."""
    starts = [stage.from_step for stage in config.run.stage]
    idle = [stage.from_step for stage in config.run.stage if not values_of(stage)]
    total = config.run.total_train_steps
    own = [source.gconfig.own.keys() for source in config.data.source]
    set_by_all = {f"gconfig.{key}" for key in set.intersection(*map(set, own))} if own else set()
    if hidden := sorted({key for stage in config.run.stage for key in values_of(stage)} & set_by_all):
        remedy = "remove it from the stages, or from a source"
        yield f"no effect of {hidden[:1]} in [[run.stage]]: each [[data.source]] sets it for all stages; {remedy}"
    if sorted(set(starts)) != starts:
        yield f"the stages of [[run.stage]] come in the order of from_step, each once: it is {starts}"
    if idle:
        yield f"no setting in [[run.stage]] with from_step = {idle[:1]}: a stage changes one of {', '.join(KEYS)}"
    if starts and starts[-1] >= total:
        yield f"a stage begins too late: from_step = {starts[-1:]} is not below run.total_train_steps ({total})"
