"""A Gymnasium environment as an episode (`pip install gymnasium`): the model answers with an action's letter.

areal-bus run examples/environments/frozen-lake.toml -np 3
"""

from collections.abc import Mapping
from typing import Any

import gymnasium

from actors.rewards.protocol import Score
from actors.workflows.protocol import Ask, Episode

LETTERS = "ldru"  # left, down, right, up: FrozenLake's actions 0 to 3
TURNS = 8


class FrozenLake:
    """Each turn shows the number of the field. Any other letter loses a turn."""

    def __init__(self, config: Any) -> None: ...

    async def episode(self, row: Mapping[str, Any], ask: Ask) -> Episode:
        lake = gymnasium.make("FrozenLake-v1", desc=row["question"].upper().split(), is_slippery=False)
        (field, _), total, moves, ids = lake.reset(), 0.0, "", ask.tokenizer.encode(row["question"])
        for _ in range(TURNS):
            ids = [*ids, *ask.tokenizer.encode(f"{field}>")]
            turn = await ask(ids)
            ids, moves = [*ids, *turn.ids], moves + (turn.text or "-")
            if turn.text in LETTERS and turn.text:
                field, reward, is_end, is_cut, _ = lake.step(LETTERS.index(turn.text))
                total += float(reward)
                if is_end or is_cut:
                    break
        lake.close()
        return Episode(text=moves, row={"total": total})


def total(row: Mapping[str, Any]) -> Score:
    """The sum of the environment's rewards, which the episode added to the row."""
    return Score(row["total"], correct=row["total"] > 0)
