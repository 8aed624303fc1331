"""Forecasts a collapse from the figures of each update. Pure: no I/O.

The alarms and the report share these rules. A sharp fall of the effective sample size (ESS) precedes a
collapse (VCPO, arXiv 2602.17616); stale data adds a bias of order staleness x learning rate (arXiv 2607.01083), which
the KL between sampler and learner shows. docs/alarms.md has the figures behind the constants.
"""

from collections.abc import Mapping
from math import inf
from statistics import fmean

COLLAPSE_PACE = 0.0165  # nats a token and version of lag, mean of two updates; clean runs of the small task: to 0.013
COLLAPSE_SIGNS = 2  # of the following: each alone is harmless in some run
COLLAPSE_ESS = 0.8  # clean runs of that task stay above 0.88, also at lag 4
COLLAPSE_KL = 0.1  # between sampler and learner, a token; they stay below 0.07
COLLAPSE_CLIP_SHARE = 0.3  # of trained tokens; a chosen bound, not measured
COLLAPSE_ENTROPY = (0.5, 1.5)  # times that of the first updates
FIRST_UPDATES = 5  # whose mean entropy is the reference


def pace(stats: Mapping[str, float], floor: float) -> float:
    """How far the policy moves in a version: the KL above its `floor` (sampler and learner at equal weights) / lag."""
    return max(stats.get("mismatch_kl", 0.0) - floor, 0.0) / max(stats.get("lag_mean", 1.0), 1.0)


def signs_of(stats: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """Signs of a collapse in the figures of an update, beside those with which the run began.

    `first`: `kl`, the least one so far, and `ess`, the largest: what sampler and learner differ by at equal weights is
    no sign; `entropy`: of the first updates, missing until it is known.
    """
    ess, kl, clip = stats.get("ess", 1.0), stats.get("mismatch_kl", 0.0), stats.get("clip_share", 0.0)
    signs = []
    if ess < COLLAPSE_ESS * first["ess"]:
        signs.append(f"the effective sample size is {ess:.2f} (under {COLLAPSE_ESS * first['ess']:.2g})")
    if kl > COLLAPSE_KL + first["kl"]:
        signs.append(f"the KL between sampler and learner is {kl:.2g} (over {COLLAPSE_KL + first['kl']:.2g})")
    if clip > COLLAPSE_CLIP_SHARE:
        signs.append(f"{clip:.0%} of the tokens are clipped (over {COLLAPSE_CLIP_SHARE:.0%})")
    entropy = first.get("entropy")
    low, high = COLLAPSE_ENTROPY
    if entropy and not low <= (ratio := stats.get("entropy", entropy) / entropy) <= high:
        signs.append(f"the entropy is {ratio:.2f} times that of the first {FIRST_UPDATES} updates")
    return signs


class CollapseForecast:
    """Receives each update once, in order. A restarted head begins with the updates that it sees."""

    def __init__(self) -> None:
        self._entropies: list[float] = []  # of the first updates
        self._first = {"kl": inf, "ess": 0.0}
        self._pace = 0.0  # of the update before
        self._holds = False

    def see(self, stats: Mapping[str, float]) -> str:
        """What announces a collapse in this update; "" if nothing does, or it did in the update before."""
        held, signs = self._holds, self.signs(stats)
        self._holds = bool(signs)
        return "" if held else ", ".join(signs)

    def signs(self, stats: Mapping[str, float]) -> list[str]:
        """What announces a collapse in the next update: its pace, or COLLAPSE_SIGNS of the others."""
        self._first["kl"] = min(self._first["kl"], stats.get("mismatch_kl", inf))
        self._first["ess"] = max(self._first["ess"], stats.get("ess", 1.0))
        if COLLAPSE_KL < self._first["kl"] < inf:
            return []  # sampler and learner never agreed: what they differ by says nothing of the policy's movement
        signs = signs_of(stats, self._first)
        if "entropy" in stats and len(self._entropies) < FIRST_UPDATES:
            self._entropies.append(stats["entropy"])
            if len(self._entropies) == FIRST_UPDATES:
                self._first["entropy"] = fmean(self._entropies)
        before, self._pace = self._pace, pace(stats, self._first["kl"])
        moved = (before + self._pace) / 2
        if moved > COLLAPSE_PACE:
            return [f"the policy moves {moved:.2g} nats a token and version (over {COLLAPSE_PACE:g})", *signs]
        return signs if len(signs) >= COLLAPSE_SIGNS else []
