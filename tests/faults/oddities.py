"""A faulty reward and a faulty workflow, as user code for rings under test."""

from collections.abc import Mapping
from typing import Any

from actors.workflows.protocol import Ask, Episode, Row
from actors.workflows.single_turn import SingleTurn


def constant(prompt: str, completion: str, row: Mapping[str, Any]) -> float:
    return 0.5


class Fussy(SingleTurn):
    """Rejects words whose first letter is in the second half of the alphabet."""

    async def episode(self, row: Row, ask: Ask) -> Episode:
        first = str(row["question"])[0]
        if first > "m":
            raise ValueError(f"no rows that begin with {first}")
        return await super().episode(row, ask)
