"""The stages of a run as the core knows them, from its settings."""

from areal_bus.config.sections import Config
from areal_bus.config.stages import sampling_of, settings_by_stage
from areal_bus.core.parts.stages import SourceLimits, Stage


def stages_of(config: Config) -> tuple[Stage, ...]:
    """By their first version, from 0. One stage without [[run.stage]]."""
    return tuple(
        Stage(
            start,
            n_samples=settings.gconfig.n_samples,
            max_new_tokens=settings.gconfig.max_new_tokens,
            max_tokens_per_mb=settings.learner.max_tokens_per_mb,
            sources=limits_of_sources(settings),
        )
        for start, settings in settings_by_stage(config).items()
    )


def temperatures_of(config: Config) -> dict[str, float]:
    """Of the log-probs of each source's samples, where it has its own temperature; greedy samples have those at 1."""
    own = ((source.label, source.gconfig.temperature) for source in config.data.source)
    return {label: temperature or 1.0 for label, temperature in own if temperature is not None}


def limits_of_sources(settings: Config) -> tuple[SourceLimits, ...]:
    """Of each [[data.source]] in one stage; () where none has limits of its own."""
    sources = settings.data.source
    if not any(source.gconfig.own for source in sources):
        return ()
    found = [(source, sampling_of(settings, source.label)) for source in sources]
    return tuple(SourceLimits(one.label, one.weight, own.n_samples, own.max_new_tokens) for one, own in found)
