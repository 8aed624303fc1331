"""The machine around the whole head notices rules that are left out, within a few of its orders of events."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.ledger import Ledger, PromptState
from areal_bus.core.rows import DataCursor
from areal_bus.core.transitions.publisher import Publisher
from areal_bus.core.transitions.rollouts import Rollouts
from tests.invariants.test_head_machine import NOBODY_MOVES, HeadMachine, settings_of

Sabotage = Callable[[pytest.MonkeyPatch], None]


def counts_older_attempts(patch: pytest.MonkeyPatch) -> None:
    of = Ledger._of
    known = lambda ledger, uid, attempt: ledger.open[uid].attempt if uid in ledger.open else attempt  # noqa: E731
    patch.setattr(Ledger, "_of", lambda self, uid, attempt: of(self, uid, known(self, uid, attempt)))


def returns_credits_early(patch: pytest.MonkeyPatch) -> None:
    take = Gate.take

    def wrong(self: Any, borns: Any) -> int:
        clock = take(self, borns)
        self.in_training = 0
        self._taken.clear()
        return clock

    patch.setattr(Gate, "take", wrong)


def begins_attempts_again(patch: pytest.MonkeyPatch) -> None:
    restart = Ledger.restart
    patch.setattr(Ledger, "restart", lambda self, *, next_uid, term: restart(self, next_uid=next_uid, term=0))


def catches_nobody_up(patch: pytest.MonkeyPatch) -> None:
    begin = Publisher._begin

    def wrong(self: Any, now: float) -> None:
        if self.gate.u > self.gate.v or self.gate.v == 0:
            begin(self, now)

    patch.setattr(Publisher, "_begin", wrong)


def forgets_leases_of_the_dead(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "lose", lambda *_, **__: [])


def ends_no_leases_in_a_new_term(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Rollouts, "_release", lambda *_: None)


def does_not_go_back_in_the_data(patch: pytest.MonkeyPatch) -> None:
    restart = DataCursor.restart

    def wrong(self: Any, *, position: int, again: Any, state: str) -> None:
        restart(self, position=max(position, self.position), again=again, state=state)

    patch.setattr(DataCursor, "restart", wrong)


def calls_a_group_ready_early(patch: pytest.MonkeyPatch) -> None:
    deliver = Ledger.deliver

    def wrong(self: Any, scored: Any) -> Any:
        entry = deliver(self, scored)
        if entry.state in (PromptState.LEASED, PromptState.SCORING):
            self.ready.add(entry)
            self._move(entry, PromptState.READY)
        return entry

    patch.setattr(Ledger, "deliver", wrong)


@pytest.mark.parametrize(
    ("sabotage", "noticed"),
    [
        (counts_older_attempts, "I6 "),
        (returns_credits_early, "I1 "),
        (begins_attempts_again, f"I6 |{NOBODY_MOVES}"),
        (catches_nobody_up, NOBODY_MOVES),
        (forgets_leases_of_the_dead, "who is not there|everybody waits"),
        (ends_no_leases_in_a_new_term, "keeps the slots|I9 "),
        (does_not_go_back_in_the_data, "I4 "),
        (calls_a_group_ready_early, "I8 "),
    ],
)
def test_a_rule_left_out_is_detected(monkeypatch: pytest.MonkeyPatch, sabotage: Sabotage, noticed: str) -> None:
    sabotage(monkeypatch)
    quick = settings(settings_of(200, always_the_same=True), phases=[Phase.generate])
    with pytest.raises(AssertionError, match=noticed):
        run_state_machine_as_test(HeadMachine, settings=quick)
