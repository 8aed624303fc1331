"""The stages of a run as the core knows them, from its settings."""

from areal_bus.config.sections import Config
from areal_bus.config.stages import settings_by_stage
from areal_bus.core.parts.stages import Stage


def stages_of(config: Config) -> tuple[Stage, ...]:
    """By their first version, from 0. One stage without [[run.stage]]."""
    return tuple(
        Stage(
            start,
            n_samples=settings.gconfig.n_samples,
            max_new_tokens=settings.gconfig.max_new_tokens,
            max_tokens_per_mb=settings.learner.max_tokens_per_mb,
        )
        for start, settings in settings_by_stage(config).items()
    )
