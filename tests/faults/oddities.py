"""Faulty rewards and a faulty workflow, as user code for rings under test."""

import time
from collections.abc import Mapping
from typing import Any

from actors.workflows.protocol import Ask, Episode, Row
from actors.workflows.single_turn import SingleTurn


def raises(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """For whatever the model writes. The call before the start has the right answer, and would refuse the rest."""
    if completion == row["answer"]:
        return 1.0
    raise ValueError("no answer is ever right")


def constant(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    return 0.5


def slow(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    """Slow enough that a killed reward has samples in progress."""
    time.sleep(0.05)
    return 0.25 + (sum(map(ord, completion)) % 11) / 20


class Fussy(SingleTurn):
    """Rejects words whose first letter is in the second half of the alphabet."""

    async def episode(self, row: Row, ask: Ask) -> Episode:
        first = str(row["question"])[0]
        if first > "m":
            raise ValueError(f"no rows that begin with {first}")
        return await super().episode(row, ask)
