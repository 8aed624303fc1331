"""Which ends in error are the faults' doing: what the head says of its end, counted again; knows no staleness."""

from typing import Any

from areal_bus import messages as m
from areal_bus.messages import Refund

EXPECTED = (Refund.TOO_OLD, Refund.END_OF_DATA, Refund.END_OF_RUN)  # no failure
PATIENCE = 5  # pushes in a row that nobody may complete


class Excuses:
    """Prompts in a row that ended without a value, pushes in a row that no generator completed."""

    def __init__(self, *, batch_size: int, calm_s: float) -> None:
        self._limit = max(3 * batch_size, 16)
        self._calm_s = calm_s
        self.begin_term()

    def begin_term(self) -> None:
        self._n_failed = 0
        self._members: list[str] = []  # of the last push
        self._begun_s = 0.0  # when it began
        self._done: set[str] = set()  # who completed it
        self._missed: list[float] = []  # when each push began that nobody has completed, in a row

    def on_ready(self, line: dict[str, Any]) -> None:
        self._n_failed = 0

    def on_refund(self, reason: str) -> None:
        self._n_failed += reason not in EXPECTED

    def on_push(self, begin: m.PushBegin, now: float) -> None:
        self._close_push()
        self._members, self._begun_s = begin.members, now

    def on_member(self, line: dict[str, Any]) -> None:
        if "version" in line:
            self._done.add(line["name"])

    def explain(self, sentence: str) -> bool:
        """Whether what a run that ended in error says of itself is so; faults end pushes only before the calm."""
        if "in a row ended without a reward" in sentence:
            return self._n_failed >= self._limit
        self._close_push()
        missed = self._missed
        return "no generator completes a push" in sentence and len(missed) >= PATIENCE and missed[-1] < self._calm_s

    def _close_push(self) -> None:
        if self._done.intersection(self._members):
            self._missed.clear()
        elif self._members:
            self._missed.append(self._begun_s)
        self._members = []
        self._done.clear()
