"""Settings of a split of ranks that changes while the job runs: [topology.adapt] (docs/adapt.md)."""

from areal_bus.config.section import Section


class AdaptSettings(Section):
    schedule: tuple[tuple[int, int], ...] = ()
    """Splits from given steps on, each [step, learners], for example [[100, 2], [400, 1]]: between two updates, ranks
    of generators become learner ranks, or back. topology.learners counts before the first step."""
