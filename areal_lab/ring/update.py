"""The update of [learner.simulated]: takes a configured time and moves the weights by version and seed only."""

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from actors.learner.batching import Batch
from areal_bus.config.learner import SimulatedUpdateConfig
from areal_bus.config.sections import Config

SLICE_S = 0.25  # between two calls of `tick`


class SimulatedUpdate:
    """Stands in for gradient and optimizer step."""

    def __init__(
        self,
        settings: SimulatedUpdateConfig,
        *,
        seed: int,
        n_epochs: int = 1,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        self._settings = settings
        self._seed = seed
        self._n_epochs = n_epochs
        self._clock = clock
        self._wait = wait

    def seconds(self, batch: Batch) -> float:
        """Time of the update of this rank's share: a constant, and its trained tokens at the configured speed."""
        n_tokens = sum(item.n_trained for item in batch.items) * self._n_epochs
        return self._settings.update_s + n_tokens / self._settings.tokens_per_s

    def run(self, batch: Batch, weights: Iterable[Tensor], *, lr: float, tick: Callable[[], None]) -> None:
        """Wait, with a `tick` now and then, then add noise of size `lr` to the weights. `tick` may raise."""
        ends = self._clock() + self.seconds(batch)
        while (left_s := ends - self._clock()) > 0:
            self._wait(min(left_s, SLICE_S))
            tick()
        noise = torch.Generator().manual_seed(self._seed + batch.clock)
        with torch.no_grad():
            for weight in weights:
                weight.add_(torch.randn(weight.shape, generator=noise), alpha=lr)


def simulated_update(config: Config) -> SimulatedUpdate:
    """That of [learner.simulated]."""
    settings = config.learner.simulated
    if settings is None:
        raise ValueError("missing table [learner.simulated]: updates compute")
    return SimulatedUpdate(settings, seed=config.run.seed, n_epochs=config.actor.ppo_epochs)
