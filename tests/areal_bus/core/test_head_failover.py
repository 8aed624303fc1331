"""A learner that outlives its head: what the next head takes from it.

`tests/actors/learner/link/test_rollout.py` has the same for the learner's own side.
"""

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import Effect, End, Mark, Send
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint
from areal_bus.core.state import HeadState
from areal_bus.messages import Role
from areal_lab.staleness.simulator.scenario import Numbers
from tests.areal_bus.core.parts.test_terms import (
    LEARNER,
    hold,
    saved,
    say,
    score,
    trained_head,
)
from tests.areal_bus.core.test_head import end_of, head_with, joined, records, refused, scenario, sent


def marks(effects: list[Effect]) -> list[HeadSavepoint]:
    return [effect.savepoint for effect in effects if isinstance(effect, Mark)]


def next_head(before: Head, savepoints: list[HeadSavepoint], *checkpoints: HeadCheckpoint) -> Head:
    """It knows what is on disk: these."""
    on_disk = {**START, **{one.version: one for one in checkpoints}}
    rules, life = before.state.rules, before.state.incarnation + 1
    state = HeadState(rules, Numbers(None), incarnation=life, term=1, checkpoints=on_disk, savepoints=savepoints)
    return Head(state, now=0.0)


def go_on(head: Head, version: int, *, learner: str = LEARNER, sealed: list[int] | None = None) -> list[Effect]:
    """A learner that lives joins this head, and says where it is."""
    begin = m.BeginTerm(version, f"digest {version}", head.state.incarnation, True, sealed or [])
    return joined(head, learner, again=head.state.incarnation) + say(head, learner, begin)


# one decision at a time


def test_a_savepoint_is_written_with_each_batch_before_any_rank_receives_it() -> None:
    _, effects = trained_head(checkpoint_every=0)
    began, first = marks(effects)
    assert (began.root, began.checkpoint.version, began.checkpoint.open) == (LEARNER, 0, ())
    assert (first.root, first.checkpoint.version, first.checkpoint.next_uid) == (LEARNER, 1, 3)
    assert [(prompt.uid, prompt.scored) for prompt in first.checkpoint.open] == [(1, ()), (2, ())]
    kinds = [
        "mark" if isinstance(effect, Mark) else type(effect.message).__name__
        for effect in effects
        if isinstance(effect, Mark)
        or (isinstance(effect, Send) and isinstance(effect.message, m.ShardItem | m.ShardEnd))
    ]
    assert kinds[1:] == ["mark", "ShardItem", "ShardItem", "ShardEnd"]


def test_the_next_head_goes_on_where_the_learner_is_without_any_checkpoint() -> None:
    """It finished update 1, and the head died before it heard of it; or after: that makes no difference."""
    before, effects = trained_head(checkpoint_every=0)
    head = next_head(before, marks(effects))
    (term,) = records(go_on(head, 1), Event.TERM)
    assert (term["term"], term["version"], term["lives_on"]) == (1, 1, True)
    assert (term["next_uid"], term["position"], term["open"], term["kept"]) == (3, 3, [1, 2], [[], []])
    assert (head.state.gate.u, head.state.gate.v, head.state.gate.w, head.state.gate.live) == (1, 1, 1, 2)


def test_a_head_checkpoint_is_preferred_to_a_savepoint_of_the_same_version() -> None:
    before, effects = trained_head(checkpoint_every=1)
    (frontier,) = saved(effects)
    (term,) = records(go_on(next_head(before, marks(effects), frontier), 1, sealed=[1]), Event.TERM)
    assert dict(zip(term["open"], term["kept"], strict=True)) == {1: [0], 2: []}  # type: ignore[call-overload]


@pytest.mark.parametrize("what", ["none", "older", "another's"])
def test_an_unknown_learner_goes_back_to_its_checkpoint(what: str) -> None:
    """No waypoint, one of another version, or one of whoever has taken its place."""
    before, effects = trained_head(checkpoint_every=0)
    known = {"none": [], "older": marks(effects)[:1], "another's": marks(effects)}[what]
    learner = "learner-0.7" if what == "another's" else LEARNER
    head = next_head(before, known)
    effects = go_on(head, 1, learner=learner)
    (order,) = [message for to, message in sent(effects, m.Rejoin) if to == learner]
    assert (order.anew, order.life) == (True, 1)
    assert not records(effects, Event.TERM)
    assert end_of(effects) is None
    back = joined(head, "learner-0.8") + say(head, "learner-0.8", m.BeginTerm(0, "digest 0", 1))
    assert records(back, Event.TERM)[0]["version"] == 0


def test_messages_addressed_to_an_earlier_head_are_refused() -> None:
    before, effects = trained_head(checkpoint_every=0)
    head = next_head(before, marks(effects))
    joined(head, LEARNER, again=1)
    assert "the learner addressed head 0," in refused(say(head, LEARNER, m.BeginTerm(1, "digest 1", 0, True)))[0]
    assert "the learner addressed head 0," in refused(say(head, LEARNER, m.BatchRequest(1, 0)))[0]


@pytest.mark.parametrize(("every", "sealed", "expected"), [(1, [], [1]), (0, [], []), (0, [1], [1])])
def test_a_version_gets_a_head_checkpoint_when_it_is_due_or_has_a_checkpoint_on_disk(
    every: int, sealed: list[int], expected: list[int]
) -> None:
    """One that was written by time may not be due, and the head that was told of it is gone."""
    before, effects = trained_head(checkpoint_every=every)
    assert [one.version for one in saved(go_on(next_head(before, marks(effects)), 1, sealed=sealed))] == expected


def test_a_head_waits_for_the_step_of_a_learner_that_lives_however_long() -> None:
    before, effects = trained_head(checkpoint_every=0)
    head = next_head(before, marks(effects))
    late = before.state.rules.assemble_s + 1.0
    say(head, LEARNER, m.Join(LEARNER, Role.LEARNER, 0, 0, LEARNER, 1, "", 1))
    assert end_of(head.tick(late)) is None
    say(head, LEARNER, m.Ready(0), late)
    assert end_of(head.tick(2 * late)) is not None


def test_a_new_rank_does_not_compute_with_ranks_that_survived_a_head() -> None:
    """One died while no head was there to see it: the others go back with it, whoever joins first."""
    rules = scenario(n_learners=2).rules
    for first, second in (("learner-0.0", "learner-1.1"), ("learner-1.1", "learner-0.0")):
        head = Head(HeadState(rules, Numbers(None), incarnation=1, term=1), now=0.0)
        effects: list[Effect] = []
        for name in (first, second):
            effects += joined(head, name, again=1 if name == "learner-0.0" else 0)
        told = [to for to, message in sent(effects, m.Rejoin) if message.anew]
        assert told == ["learner-0.0"]
        assert "learner-0.0" not in head.state.members.by_name


def test_a_learner_that_joins_twice_on_its_way_from_head_to_head_is_one() -> None:
    head, _ = head_with(checkpoint_every=0)
    effects = say(head, LEARNER, m.Join(LEARNER, Role.LEARNER, 0, 0, LEARNER, 1, "", 3))
    assert not sent(effects, m.Rejoin)
    assert head.state.terms.begun_by == LEARNER


# a job that drains, and whose head dies


def test_a_head_that_drains_from_its_beginning_waits_for_a_learner_that_lives() -> None:
    """Its supervisor tells it to, as it had told the one before. What the learner has goes on to disk first."""
    before, effects = trained_head(checkpoint_every=0)
    head = next_head(before, marks(effects))
    assert end_of(head.drain(0.1)) is None
    begun = next_head(before, marks(effects))
    go_on(begun, 1)
    for told in (go_on(head, 1), begun.drain(0.1)):  # also when the learner has begun, and the ring is not complete
        assert (end_of(told), [one.version for one in saved(told)]) == (None, [1])
    (answer,) = [message for _, message in sent(say(head, LEARNER, m.BatchRequest(1, 1)), m.NoBatch)]
    assert (answer.step, answer.drained) == (1, True)
    assert end_of(say(head, LEARNER, m.Finished("", ""))) == End(0, "drained at version 1")


def test_it_does_not_wait_for_ever_nor_where_nothing_can_be_lost() -> None:
    before, effects = trained_head(checkpoint_every=0)
    head = next_head(before, marks(effects))
    head.drain(0.1)
    assert end_of(head.tick(before.state.rules.assemble_s + 1.0)) == End(0, "drained before the first step")
    assert end_of(next_head(before, marks(effects)[:1]).drain(0.1)) == End(0, "drained before the first step")


def test_the_largest_lag_is_carried_from_head_to_head() -> None:
    before, effects = trained_head(checkpoint_every=0)
    effects += hold(before, 1) + score(before, 1, [1]) + say(before, LEARNER, m.BatchRequest(1))
    say(before, LEARNER, m.UpdateDone(2, {"lag_max": 1.0}, "digest 2"))
    assert before.state.max_lag == 1
    head = next_head(before, marks(effects)[-2:])
    joined(head, LEARNER, again=1)
    say(head, LEARNER, m.BeginTerm(2, "digest 2", 1, True, [], 2))
    assert head.state.max_lag == 2
