"""Settings of the simulated update."""

from pydantic import Field

from areal_bus.config.section import Section


class SimulatedUpdateConfig(Section):
    update_s: float = Field(0.5, ge=0)
    """Time of an update, beside that of its tokens."""
    tokens_per_s: float = Field(100_000.0, gt=0)
    """Trained tokens of one learner rank in a second."""
