"""Tool and reward of the examples: a customer writes `send 75 to cfc`, the model calls `[send(n=75, to="cfc")]`."""

from collections.abc import Mapping
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
        """The reward: what the customer wrote was sent, and nothing else."""
        is_right = self.sent == [row["answer"]]
        return {"reward": float(is_right), "correct": is_right, "parts": {"calls": len(self.sent)}}
