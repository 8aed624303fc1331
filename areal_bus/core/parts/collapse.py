"""Forecasts a collapse from the figures of each update, and describes the rollback that answers it. Pure: no I/O.

The head, the alarms and the report share these rules. A sharp fall of the effective sample size (ESS) precedes a
collapse (VCPO, arXiv 2602.17616); stale data adds a bias of order staleness x learning rate (arXiv 2607.01083), which
the KL between sampler and learner shows. docs/alarms.md has the figures behind the constants.
"""

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import islice
from math import inf, sqrt
from statistics import fmean

COLLAPSE_PACE = 0.037  # nats a token and version, mean of two updates; docs/alarms.md: 0.03 in health, 0.045 planted
COLLAPSE_SIGNS = 2  # of the following: each alone is harmless in some run
COLLAPSE_ESS = 0.8  # clean runs of that task stay above 0.88, also at lag 4
COLLAPSE_KL = 0.1  # between sampler and learner, a token; they stay below 0.07
COLLAPSE_CLIP_SHARE = 0.3  # of trained tokens; a chosen bound, not measured
COLLAPSE_ENTROPY = (0.5, 1.5)  # times that of the first updates
FIRST_UPDATES = 5  # whose mean entropy is the reference
MARGIN = 5  # versions before a forecast that are not trusted: the figures lag behind the policy
LR_SHARE = 1 / 2  # of the rate at the limit: a quarter of the KL
N_RATES = 256  # updates whose learning rate is remembered


@dataclass(frozen=True, slots=True)
class Rollback:
    """An order of the head to undo updates, in RUN/rollback.json. One a run."""

    term: int  # that the order ends: until the next one begins, learners begin at `to` or below
    at: int  # version of the forecast
    to: int
    max_lr: float  # from `to` on
    why: str

    def caps(self, version: int) -> float:
        """The most that the learning rate may be in the update of this version."""
        return self.max_lr if version >= self.to else inf

    def is_open(self, next_term: int) -> bool:
        """Whether no term has begun since. `next_term`: the number that the next one will have."""
        return next_term == self.term + 1


def last_good(checkpoints: Collection[int], at: int) -> int:
    """The version of these checkpoints that a forecast at version `at` goes back to; 0 if all are too new."""
    return max((version for version in checkpoints if version <= at - MARGIN), default=0)


def kept_for_rollback(checkpoints: Collection[int], newest: int) -> set[int]:
    """Of these checkpoints those that forecasts after version `newest` need: the last good one, and its successor."""
    good = last_good(checkpoints, newest)
    return {good, min((version for version in checkpoints if version > good), default=good)}


def signs_of(stats: Mapping[str, float], first: Mapping[str, float]) -> list[str]:
    """Signs of a collapse in the figures of an update, beside those with which the run began.

    `first`: `kl`, the least one so far, and `ess`, the largest: what sampler and learner differ by at equal weights is
    no sign; `entropy`: of the first updates, missing until it is known.
    """
    ess, kl, clip = stats.get("ess", 1.0), stats.get("mismatch_kl", 0.0), stats.get("clip_share", 0.0)
    most_kl, signs = COLLAPSE_KL + first.get("kl", 0.0), []
    if ess < COLLAPSE_ESS * first["ess"]:
        signs.append(f"the effective sample size is {ess:.2f} (under {COLLAPSE_ESS * first['ess']:.2g})")
    if kl > most_kl:
        signs.append(f"the KL between sampler and learner is {kl:.2g} (over {most_kl:.2g})")
    if clip > COLLAPSE_CLIP_SHARE:
        signs.append(f"{clip:.0%} of the tokens are clipped (over {COLLAPSE_CLIP_SHARE:.0%})")
    entropy = first.get("entropy")
    low, high = COLLAPSE_ENTROPY
    if entropy and not low <= (ratio := stats.get("entropy", entropy) / entropy) <= high:
        signs.append(f"the entropy is {ratio:.2f} times that of the first {FIRST_UPDATES} updates")
    return signs


class CollapseForecast:
    """Receives each update once, in order. Head checkpoints hold `first`."""

    def __init__(self, first: Mapping[str, float] | None = None) -> None:
        """`first`: of the run until now."""
        self.first = dict(first or {})  # figures with which the run began (`signs_of`)
        self._entropies: list[float] = []  # of the first updates
        self._rates: deque[float] = deque(maxlen=N_RATES)  # learning rates of the updates, newest first
        self._paces: deque[float] = deque(maxlen=2)
        self._holds = False

    def see(self, stats: Mapping[str, float]) -> str:
        """What announces a collapse in this update; "" if nothing does, or it did in the update before."""
        held, signs = self._holds, self.signs(stats)
        self._holds = bool(signs)
        return "" if held else ", ".join(signs)

    def signs(self, stats: Mapping[str, float]) -> list[str]:
        """What announces a collapse in the next update: its pace, or COLLAPSE_SIGNS of the others."""
        first = self.first
        if "mismatch_kl" in stats:
            first["kl"] = min(first.get("kl", inf), stats["mismatch_kl"])
        first["ess"] = max(first.get("ess", 0.0), stats.get("ess", 1.0))
        self._measure_pace(stats)
        if first.get("kl", 0.0) > COLLAPSE_KL:
            return []  # sampler and learner never agreed: what they differ by says nothing of the policy's movement
        signs = signs_of(stats, first)
        if "entropy" in stats and "entropy" not in first:
            self._entropies.append(stats["entropy"])
            if len(self._entropies) == FIRST_UPDATES:
                first["entropy"] = fmean(self._entropies)
        if self.pace > COLLAPSE_PACE:
            return [f"the policy moves {self.pace:.2g} nats a token and version (over {COLLAPSE_PACE:g})", *signs]
        return signs if len(signs) >= COLLAPSE_SIGNS else []

    @property
    def pace(self) -> float:
        """Mean of the last two updates that were trained on older samples; 0 before the first."""
        return fmean(self._paces) if self._paces else 0.0

    def _measure_pace(self, stats: Mapping[str, float]) -> None:
        """The KL that samples would have after this update, a version. It grows with the square of the summed rates.

        The KL of this update, less the least one (of equal weights), is that of the updates since its samples: as many
        as their mean lag.
        """
        n, rate = round(stats.get("lag_mean", 0.0)), stats.get("lr", 1.0)
        known = list(islice(self._rates, n))
        before = sum(known) + (n - len(known)) * (known[-1] if known else rate)
        self._rates.appendleft(rate)
        if before > 0:
            kl = max(stats.get("mismatch_kl", 0.0) - self.first.get("kl", 0.0), 0.0)
            self._paces.append(kl * ((before + rate) / before) ** 2 / (n + 1))

    def smaller_lr(self, stats: Mapping[str, float], n_undone: int) -> float:
        """The learning rate after a rollback of `n_undone` updates, the last of which has these figures.

        LR_SHARE of the one that keeps pace and KL at their limits, and not above those of the updates that stay.
        """
        kl = max(stats.get("mismatch_kl", 0.0), COLLAPSE_KL)
        excess = max(kl / COLLAPSE_KL, self.pace / COLLAPSE_PACE)
        return min(self._rates[0] * LR_SHARE / sqrt(excess), max(islice(self._rates, n_undone, None), default=inf))
