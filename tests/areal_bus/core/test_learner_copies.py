"""A learner that died comes back from a copy in memory: what the head keeps, and what it refuses."""

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.ledger import PromptState
from areal_bus.core.state import Phase
from tests.areal_bus.core.parts.test_terms import LEARNER, hold, saved, say, score, train_one, trained_head
from tests.areal_bus.core.test_head import end_of, joined, records, sent
from tests.areal_bus.core.test_head_failover import marks, next_head

NEXT = "learner-0.1"


def restore(head: Head, version: int, digest: str = "") -> list[Effect]:
    """The next learner joins with a copy of this version."""
    begin = m.BeginTerm(version, digest or f"digest {version}", head.state.incarnation, restored=True)
    return joined(head, NEXT) + say(head, NEXT, begin)


def term_of(effects: list[Effect]) -> dict[str, object]:
    (line,) = records(effects, Event.TERM)
    return line


def in_training() -> tuple[Head, list[Effect]]:
    """Version 1 is published; prompt 1 is batch 1, in training; prompts 2 and 3 are open."""
    head, effects = trained_head(checkpoint_every=0)
    effects += hold(head, 1)
    effects += score(head, 1, [1], version=1) + say(head, LEARNER, m.BatchRequest(1))
    assert (head.state.gate.u, head.state.gate.w, head.state.gate.in_training) == (1, 2, 1)
    return head, effects


def test_a_copy_of_u_undoes_nothing_and_the_batch_in_training_is_formed_again() -> None:
    head, _ = in_training()
    n_admitted, gate = head.state.ledger.next_uid, head.state.gate
    effects = restore(head, 1)
    term = term_of(effects)
    assert (term["version"], term["lives_on"], term["restored"]) == (1, True, True)
    assert (term["next_uid"], term["open"]) == (n_admitted, list(range(1, n_admitted)))
    assert term["kept"][0] == [0, 1]  # type: ignore[index]
    assert head.state.ledger.open[1].state is PromptState.READY
    assert (gate.u, gate.v, gate.w, gate.live, gate.in_training) == (1, 1, 1, n_admitted - 1, 0)
    again = say(head, NEXT, m.BatchRequest(1))
    assert [(line["step"], line["n_groups"]) for line in records(again, Event.BATCH)] == [(1, 1)]
    assert {line["uid"] for line in records(again, Event.TRAJECTORY)} == {1}
    assert [checkpoint.version for checkpoint in saved(effects)] == [1]  # the learner may checkpoint it at once


def test_a_copy_of_an_update_that_no_head_received_counts() -> None:
    """The learner died between its copy and its UpdateDone."""
    head, _ = in_training()
    n_admitted = head.state.ledger.next_uid
    term = term_of(restore(head, 2))
    assert (term["version"], term["lives_on"], term["open"]) == (2, True, list(range(2, n_admitted)))
    assert (head.state.gate.u, head.state.gate.w) == (2, 2)


@pytest.mark.parametrize("phase", [Phase.TRAINING, Phase.CLOSING])
def test_an_older_copy_undoes_the_updates_since(phase: Phase) -> None:
    """Copies are rarer where they cost much: the head has kept its state of then."""
    head, _ = in_training()
    say(head, LEARNER, m.UpdateDone(2, {}, "digest 2", held=True))
    open_then = list(head.state.ledger.open)
    hold(head, 2)
    train_one(head, 2, 2)
    head.state.phase = phase
    term = term_of(restore(head, 2))
    assert (term["version"], term["lives_on"], term["open"]) == (2, False, open_then)
    assert "restored" not in term


def test_a_copy_of_other_weights_is_refused_and_dropped() -> None:
    head, _ = in_training()
    effects = restore(head, 1, digest="of another timeline")
    (order,) = [message for to, message in sent(effects, m.Rejoin) if to == NEXT]
    assert (order.anew, order.undo) == (True, True)
    assert not records(effects, Event.TERM)
    assert end_of(effects) is None


@pytest.mark.parametrize(("version", "is_known"), [(2, True), (1, True), (0, False)])
def test_the_next_head_takes_a_copy_of_the_last_two_batches(version: int, is_known: bool) -> None:
    """Its savepoints say what was open. Version 0 begins from the model in any case."""
    before, effects = in_training()
    head = next_head(before, marks(effects)[-2:])
    term = term_of(restore(head, version))
    assert (term["version"], term["lives_on"]) == (version, is_known)


def test_the_next_head_refuses_a_copy_of_which_it_knows_nothing() -> None:
    before, effects = in_training()
    head = next_head(before, marks(effects)[-2:])
    refused = restore(head, 3)
    assert [message.undo for to, message in sent(refused, m.Rejoin) if to == NEXT] == [True]
    assert end_of(refused) is None
