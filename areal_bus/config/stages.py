"""Stages of a run, tables [[run.stage]]: their settings, rules, and how they resolve to whole settings. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from areal_bus.config.section import Section

if TYPE_CHECKING:
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


KEYS = ("gconfig.n_samples", "gconfig.max_new_tokens", "learner.max_tokens_per_mb")  # that a stage may set


def settings_by_stage(config: Config) -> dict[int, Config]:
    """First version -> the settings from then on, without [[run.stage]]. Begins at 0; one entry without stages."""
    now = config.model_copy(update={"run": config.run.model_copy(update={"stage": ()})})
    found = {0: now}
    for stage in config.run.stage:
        now = with_values(now, values_of(stage))
        found[stage.from_step] = now
    return found


def largest(config: Config) -> Config:
    """The settings with the largest value that any stage has of each key: the bound of what is fixed at the start."""
    if not config.run.stage:
        return config
    stages = settings_by_stage(config).values()
    values = {key: max(value_at(stage, key) for stage in stages) for key in KEYS}
    return with_values(next(iter(stages)), values)


def smallest_group(config: Config) -> int:
    """The smallest gconfig.n_samples of all stages."""
    return min(stage.gconfig.n_samples for stage in settings_by_stage(config).values())


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
    if sorted(set(starts)) != starts:
        yield f"the stages of [[run.stage]] come in the order of from_step, each once: it is {starts}"
    if idle:
        yield f"no setting in [[run.stage]] with from_step = {idle[:1]}: a stage changes one of {', '.join(KEYS)}"
    if starts and starts[-1] >= total:
        yield (
            f"a stage begins before the run ends: from_step = {starts[-1:]} is not below run.total_train_steps "
            f"({total})"
        )
