"""Nim by self-play: one policy in both seats, or against a frozen opponent. Who takes the last of a pile wins.

areal-bus run examples/self_play/nim.toml -np 3
"""

from collections.abc import Mapping
from typing import Any

from opponent import Opponent

from actors.rewards.protocol import Score, zero_sum
from actors.workflows.protocol import Ask, Episode

SEATS = ["first", "second"]
FROZEN = {"older": "version - 10", "start": "version - 1000000000"}  # no checkpoint is that much older: version 0


class Nim:
    """A move is a digit, 1 to 3; any other answer, or more than the pile has, loses."""

    def __init__(self, config: Any) -> None:
        self._frozen = {name: Opponent(config, which) for name, which in FROZEN.items()}

    async def episode(self, row: Mapping[str, Any], ask: Ask) -> Episode:
        asks = dict.fromkeys(SEATS, ask)
        if row["against"] in FROZEN:  # plays "second"
            asks["second"] = self._frozen[row["against"]].ask(ask)
        pile, seat, moves = int(row["question"]), "second", ""
        views = {seat: list[int]() for seat in SEATS}
        while pile:
            seat = SEATS[seat == "first"]
            views[seat] += ask.tokenizer.encode(f"{pile:x}>")
            turn = await asks[seat](views[seat], trajectory=SEATS.index(seat))
            views[seat] += turn.ids
            taken = int(turn.text) if turn.text and turn.text in "123" else 0
            moves += turn.text or "-"
            if not 1 <= taken <= pile:
                seat = SEATS[seat == "first"]  # the other one wins
                break
            pile -= taken
        roles = [one for one in SEATS if asks[one] is ask and views[one]]
        return Episode(text=moves, row={"winner": seat}, roles=roles)


def outcome(row: Mapping[str, Any]) -> Score:
    """1 for the winner, -1 for the loser. The reward that is reported is that of "first"."""
    rewards = zero_sum({seat: 1.0 if seat == row["winner"] else -1.0 for seat in SEATS})
    won = row["winner"] == "first" if row["against"] in FROZEN else None
    return Score(rewards["first"], correct=won, role_rewards=rewards)
