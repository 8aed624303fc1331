"""Settings of a stage of a run: a table [[run.stage]]. Imports without torch. `stage_rules.py` resolves them."""

from pydantic import Field

from areal_bus.config.section import Section


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
