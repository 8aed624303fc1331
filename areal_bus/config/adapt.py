"""Settings of a split of ranks that changes while the job runs: [topology.adapt] (docs/adapt.md)."""

from pydantic import Field

from areal_bus.config.section import Section


class AdaptSettings(Section):
    schedule: tuple[tuple[int, int], ...] = ()
    """Splits from given steps on, each [step, learners], for example [[100, 2], [400, 1]]: between two updates, ranks
    of generators become learner ranks, or back. topology.learners counts before the first step."""
    every_steps: int = Field(0, ge=0)
    """The head chooses split, eta and slots from what it measures: at most one change of split and of eta, and one fall
    of the slots, in so many updates. 0: off."""
    min_learners: int = Field(1, ge=1)
    """Fewest learner ranks that it may choose."""
    max_learners: int | None = Field(None, ge=1)
    """Most learner ranks that it may choose; empty: as many as leave one generator."""
    hysteresis: float = Field(0.03, gt=0, lt=1)
    """Smallest predicted gain in throughput, as a share, for which the split changes."""
    eta_min: int | None = Field(None, ge=1)
    """Eta may fall to this value where the throughput stays within 2 % of the best; it stays at or below
    rollout.max_head_offpolicyness, which bounds the age of tokens as ever. Empty: eta does not change."""
    slots_min: int | None = Field(None, ge=1)
    """The live samples of a generator may fall from rollout.max_concurrent_rollouts to this, at least one group, where
    the throughput stays within 2 % of the best: samples end sooner. Empty: they do not change."""
