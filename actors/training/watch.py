"""Warns of tokens that are too old to be trained, and names the eta that would mend it (others: actors/alerts.py)."""

from collections.abc import Callable

import torch

from actors.training.batch import Batch
from actors.training.figures import Figures

MASKED_SHARE = 0.1


class Watch:
    """Warns once, when more than a tenth of the sampled tokens are masked."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._said_masked = False

    def look(self, batch: Batch, figures: Figures, *, eta: int) -> None:
        """One step: `figures` are those of all ranks, `batch` this rank's share."""
        sums = figures.sums
        if sums.tokens and sums.masked / sums.tokens > MASKED_SHARE and not self._said_masked:
            self._said_masked = True
            self._warn(
                f"{sums.masked / sums.tokens:.0%} of the sampled tokens are older than eta = {eta} versions and train "
                f"nothing: rollout.max_head_offpolicyness = {mending_eta(batch)} would keep that below "
                f"{MASKED_SHARE:.0%}"
            )


def mending_eta(batch: Batch) -> int:
    """Smallest eta under which at most a tenth of this share's sampled tokens would be masked."""
    lags = torch.cat([item.lags_K for item in batch.items]).sort().values if batch.items else torch.zeros(1)
    allowed = int(MASKED_SHARE * len(lags))
    return int(lags[len(lags) - 1 - allowed])
