"""A run's own throughput beside that of its simulation."""

from dataclasses import dataclass

from areal_bus.config import Config
from tools.simulate.measured import Measured
from tools.simulate.outcome import Outcome, settled
from tools.simulate.plan import Split, as_measured, schedules


@dataclass(frozen=True, slots=True)
class Known:
    """What a run came to, and what was simulated of it."""

    eta: int
    measured: float  # tokens/s
    n_updates: int
    simulated: Outcome

    @property
    def error(self) -> float:
        """How much too fast the simulated one is, as a share."""
        return self.simulated.tokens_per_s / self.measured - 1


def known(config: Config, speeds: Measured, seen: Measured, *, eta: int, n_steps: int, seed: int = 0) -> Known:
    """The run `seen`, of this config but at this eta, played by the speeds and lengths of `speeds`."""
    ((_, _, schedule),) = schedules(config, as_measured(speeds), [split_of(seen)], [eta])
    return Known(eta, seen.tokens_per_s, seen.n_updates, settled(schedule, n_steps=n_steps, seed=seed))


def split_of(seen: Measured) -> Split:
    """On one device, too: the speeds of such a run have it in them."""
    return Split(seen.n_learners, seen.n_generators)
