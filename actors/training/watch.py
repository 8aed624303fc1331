"""Says it in a sentence when training stands still; knows nothing of how anything was computed."""

from collections.abc import Callable

import torch

from actors.training.batch import Batch
from actors.training.figures import Figures

STEPS_WITHOUT_SIGNAL = 5
MASKED_SHARE = 0.1


class Watch:
    """Warns once a streak: no group with a signal for five steps, or more than a tenth of the tokens masked."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._n_without_signal = 0
        self._said_no_signal = False
        self._said_masked = False

    def look(self, batch: Batch, figures: Figures, *, eta: int) -> None:
        """One step: `figures` are those of all ranks, `batch` this rank's share."""
        sums = figures.sums
        if sums.zero_groups < sums.groups:
            self._n_without_signal, self._said_no_signal = 0, False
        else:
            self._n_without_signal += 1
            is_due = self._n_without_signal >= STEPS_WITHOUT_SIGNAL and not self._said_no_signal
            if is_due and batch.items:  # a rank's share may be empty: a later one has a sample to show
                self._said_no_signal = True
                item = batch.items[0]
                self._warn(
                    f"no group had a signal for {self._n_without_signal} steps in a row (all its rewards were equal), "
                    f"so nothing is learned: for example a reward of {item.reward:g} for {_short(item.text)!r}"
                )
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


def _short(text: str, limit: int = 200) -> str:
    return text if len(text) <= limit else text[:limit] + "..."
