"""Counts failed scores (timeout or error) and warns when they exceed 5 %."""

import re
from collections import Counter

from areal_bus.messages import Scored, VerdictStatus

SHARE = 0.05  # share of failed scores above which a warning is due
FIRST = 40  # scores before the first warning, so that one early failure causes none
MOST_KINDS = 1000  # different errors that are counted
SHOWN = 300  # characters of an error
VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d+(?:\.\d+)?")  # parts of an error text that differ between answers


class ScoreFailures:
    """Counts every accepted verdict of this head, in training and evaluation."""

    def __init__(self) -> None:
        self.n = 0
        self.n_by_status: Counter[str] = Counter()  # of those that failed
        self._kinds: Counter[str] = Counter()
        self._examples: dict[str, str] = {}  # kind -> the first error of it
        self._was_said = False

    @property
    def n_failed(self) -> int:
        return self.n_by_status.total()

    def add(self, scored: Scored) -> None:
        """One more score."""
        self.n += 1
        if scored.status == VerdictStatus.VALUE:
            return
        self.n_by_status[scored.status] += 1
        text = " ".join(scored.error.split())[:SHOWN] or f"no text with the {scored.status}"
        kind = VARIES.sub("*", text)
        if kind in self._kinds or len(self._kinds) < MOST_KINDS:
            self._kinds[kind] += 1
            self._examples.setdefault(kind, text)

    def warning(self) -> str | None:
        """The warning, returned once: after FIRST scores, as soon as more than SHARE of them failed."""
        if self._was_said or self.n < FIRST or not self._are_many:
            return None
        self._was_said = True
        return f"{self._sentence()}; reward.on_error, on_timeout and partial_groups say what becomes of such samples"

    def summary(self) -> str | None:
        """A sentence for the end of the run, if more than SHARE failed."""
        return f"over the whole run {self._sentence()}" if self._are_many else None

    @property
    def _are_many(self) -> bool:
        return self.n_failed > SHARE * self.n

    def _sentence(self) -> str:
        (kind, n_times), *_ = self._kinds.most_common(1)
        statuses = ", ".join(f"{n} {status}{'s' * (n != 1)}" for status, n in sorted(self.n_by_status.items()))
        share = f"{self.n_failed} of {self.n} scores failed ({100 * self.n_failed / self.n:.1f} %: {statuses})"
        return f"{share}; most often, {n_times} times: {self._examples[kind]}"
