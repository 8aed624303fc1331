"""Which ends in error are the faults' doing: what the head says of its end, counted again; knows no staleness."""

from typing import Any

from areal_bus.messages import Refund
from areal_bus.simulation.pushed import Pushed
from areal_bus.simulation.scenario import Scenario

EXPECTED = (Refund.TOO_OLD, Refund.END_OF_DATA, Refund.END_OF_RUN)  # no failure
PATIENCE = 5  # pushes of its own in a row that a generator may miss


class Excuses:
    """Prompts in a row that ended without a value, generators that complete no push."""

    def __init__(self, scenario: Scenario, pushed: Pushed) -> None:
        self._scenario, self._pushed = scenario, pushed
        self._limit = max(3 * scenario.batch_size, 16)
        self.begin_term()

    def begin_term(self) -> None:
        self._n_failed = 0

    def on_ready(self, line: dict[str, Any]) -> None:
        self._n_failed = 0

    def on_refund(self, reason: str) -> None:
        self._n_failed += reason not in EXPECTED

    def explain(self, sentence: str) -> bool:
        """Whether what a run that ended in error says of itself is so; faults end pushes only before the calm."""
        if "in a row ended without a reward" in sentence:
            return self._n_failed >= self._limit
        n_hopeless = self._pushed.hopeless(PATIENCE, self._scenario.calm_s)
        return "no generator completes a push" in sentence and n_hopeless >= self._scenario.n_generators
