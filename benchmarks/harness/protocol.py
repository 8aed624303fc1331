"""The protocol of a bench: it runs and returns figures."""

from typing import Any, Protocol

Figures = dict[str, Any]  # name -> number, text, None or a mapping of numbers


class Bench(Protocol):
    """One bench. Its figures are measured now or not given at all: no stored figure stands in for a missing peer."""

    @property
    def about(self) -> str:
        """One line for the list."""

    def measure(self, *, quiet: bool) -> Figures:
        """Run it; with `quiet`, what it runs writes to standard error. Raises ConfigError when it cannot run here."""
