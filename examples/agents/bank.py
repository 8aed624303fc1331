"""Tool and reward of the examples: a customer writes `send 75 to cfc`, the model calls `[send(n=75, to="cfc")]`."""

from collections.abc import Mapping
from difflib import SequenceMatcher
from typing import Any


class Bank:
    """The tool of one episode, which notes what was sent."""

    def __init__(self) -> None:
        self.sent: list[str] = []

    def send(self, n: int, to: str) -> str:
        """Send n coins to somebody."""
        self.sent.append(f"{n} {to}")
        return self.sent[-1]

    def score(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The reward: how alike the first transfer and the one that the customer wrote are; 0 without a transfer."""
        alike = SequenceMatcher(None, self.sent[0], row["answer"]).ratio() if self.sent else 0.0
        return {"reward": alike, "correct": self.sent == [row["answer"]], "parts": {"calls": len(self.sent)}}
