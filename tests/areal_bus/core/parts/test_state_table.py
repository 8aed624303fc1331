"""The tables of states: edges that are not listed are forbidden, and the ring passes no others."""

from itertools import product

import pytest

from areal_bus.core.members.membership import MEMBER_STATES, MemberState
from areal_bus.core.parts.ledger import LIVE, PROMPT_STATES, Ledger, PromptState
from areal_bus.core.parts.state_table import StateTable
from areal_bus.errors import ImpossibleEvent

TABLES = pytest.mark.parametrize(
    ("table", "states"), [(PROMPT_STATES, PromptState), (MEMBER_STATES, MemberState)], ids=["prompt", "member"]
)


@TABLES
def test_move_refuses_each_edge_that_the_table_does_not_list(table: StateTable, states: type) -> None:
    for before, after in product(states, states):
        if before is after or (before, after) in table.moves:
            assert table.move(before, after) is after
        else:
            with pytest.raises(
                ImpossibleEvent, match=f"forbidden transition of a {table.subject}: {before} -> {after}"
            ):
                table.move(before, after)


@TABLES
def test_each_state_is_reached_from_a_first_one(table: StateTable, states: type) -> None:
    reached = set(table.begins)
    for _ in states:
        reached |= {after for before, after in table.moves if before in reached}
    assert reached == set(states)
    for state in set(states) - set(table.begins):
        with pytest.raises(ImpossibleEvent, match="forbidden first state"):
            table.begin(state)


def test_a_closed_prompt_leaves_no_state_and_each_live_one_can_be_refunded() -> None:
    assert {PromptState.TRAINED, PromptState.REFUNDED}.isdisjoint({before for before, _ in PROMPT_STATES.moves})
    assert {before for before, after in PROMPT_STATES.moves if after is PromptState.REFUNDED} == set(LIVE)


def test_a_forbidden_transition_changes_nothing() -> None:
    ledger = Ledger()
    entry = ledger.admit(born=0, n_samples=1, holder="generator-0.0")
    with pytest.raises(ImpossibleEvent):
        ledger._move(entry, PromptState.TRAINED)
    assert entry.state is PromptState.LEASED
    assert ledger.counts == {PromptState.LEASED: 1}
