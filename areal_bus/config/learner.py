"""Settings of the learner beside its own section: low-rank adapters, the simulated update."""

from pydantic import Field

from areal_bus.config.section import Section


class SimulatedUpdateConfig(Section):
    update_s: float = Field(0.5, ge=0)
    """Time of an update, beside that of its tokens."""
    tokens_per_s: float = Field(100_000.0, gt=0)
    """Trained tokens of one learner rank in a second."""


class LoraConfig(Section):
    rank: int = Field(16, ge=1)
    """R: a layer of F outputs and E inputs has R (F + E) trained numbers."""
    alpha: float = Field(32.0, gt=0)
    """The product of the two matrices is multiplied by alpha / rank."""
    target_modules: tuple[str, ...] = ()
    """Linear layers with adapters, by the last part of their names, as ["q_proj", "v_proj"]. Empty: all linear layers
    of the decoder layers."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout before the adapters, in passes with a gradient only."""

    offload: bool = False
    """Keep the weights of the adapted layers in host memory and copy each to the learner's GPU when it is used. For one
    learner, with learner.gradient_checkpointing."""

    @property
    def scale(self) -> float:
        """Factor of the product of the two matrices."""
        return self.alpha / self.rank
