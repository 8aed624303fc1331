"""The pool of ranks that change their role, and a change of the split step by step."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus import messages as m
from areal_bus.core.effects import Divide, Effect
from areal_bus.core.head import Head
from areal_bus.core.parts.head_checkpoint import START
from areal_bus.core.parts.split import RankPool, Split, scheduled
from areal_bus.core.state import HeadState, Phase
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role
from areal_lab.staleness.simulator.scenario import Numbers
from tests.areal_bus.core.parts.test_terms import LEARNER, saved, say, train_one, trained_head
from tests.areal_bus.core.test_head import end_of, joined, push_done, refused, scored, sent

SECOND = "generator-1.0"


@given(
    least=st.integers(1, 4), most=st.integers(1, 6), width=st.integers(1, 3), divisor=st.integers(1, 3), data=st.data()
)
def test_every_split_uses_all_ranks_and_keeps_a_generator(
    least: int, most: int, width: int, divisor: int, data: st.DataObject
) -> None:
    """Indices have no gaps, and exactly the actors of a split have a place in it."""
    pool = RankPool(least, most, width, divisor)
    for learners in range(least + most * width + 2):
        assert (pool.refusal(learners) == "") == (learners in pool.choices())
    for learners in pool.choices():
        split = Split(learners, pool.generators_at(learners))
        assert split.learners + split.generators * width == least + most * width
        assert split.learners >= least
        assert split.generators >= 1
        index = data.draw(st.integers(0, least + most * width))
        assert pool.has_place(Role.LEARNER, index, split) == (index < learners)
        is_guest = index >= most
        assert pool.has_place(Role.GENERATOR, index, split) == (index < split.generators or is_guest)


def test_a_schedule_holds_from_its_steps_on() -> None:
    assert [scheduled([(2, 3), (5, 1)], version) for version in (0, 1, 2, 4, 5, 9)] == [None, None, 3, 3, 1, 1]


def changing() -> Head:
    """Version 1 is made, and from version 1 on two learners are wanted in place of generator 1, which has joined."""
    head, _ = trained_head(n_generators=2, schedule=((1, 2),))
    assert head.state.change.target == 2
    return head


def finish_work(head: Head) -> None:
    """Every lease of generator 1 is sampled and scored."""
    for entry in [entry for entry in head.state.ledger.live() if entry.holder == SECOND]:
        for sample in entry.missing:
            say(head, "reward-0.0", scored(entry.uid, sample, entry.attempt, generator=SECOND))


def hand_over(head: Head) -> list[Effect]:
    """No push is in flight, the learner asks for a batch, and gets none."""
    for name in (LEARNER, "generator-0.0", SECOND):
        push_done(head, name, 1)
    finish_work(head)
    return say(head, LEARNER, m.BatchRequest(1, head.state.incarnation))


def test_the_new_split_is_written_before_it_is_sent() -> None:
    head = changing()
    effects = hand_over(head)
    assert sent(effects, m.NoBatch) == [(LEARNER, m.NoBatch(1, drained=True))]
    assert [one.version for one in saved(effects)] == [1]
    effects = say(head, LEARNER, m.Checkpointed(1, "")) + say(head, LEARNER, m.Finished("", ""))
    kinds = [type(effect) if not hasattr(effect, "message") else type(effect.message) for effect in effects]
    assert kinds.index(Divide) < kinds.index(m.Reassign)
    (divide,) = [effect for effect in effects if isinstance(effect, Divide)]
    assert divide.split == head.state.split == Split(2, 1, 1, 1)
    assert divide.checkpoint.version == 1
    assert {to for to, _ in sent(effects, m.Reassign)} == {LEARNER, SECOND}
    assert end_of(effects) is None


def committed() -> Head:
    head = changing()
    hand_over(head)
    say(head, LEARNER, m.Checkpointed(1, ""))
    say(head, LEARNER, m.Finished("", ""))
    return head


def rejoin(head: Head, name: str, split: int) -> list[Effect]:
    role, _, rest = name.partition("-")
    index, incarnation = map(int, rest.split("."))
    endpoint = "" if role == "generator" else name
    return head.on(name, m.Join(name, role, index, incarnation, endpoint, 1, "", split=split), 0.0)


@pytest.mark.parametrize(("name", "split"), [("learner-0.1", 0), ("learner-2.1", 1), ("generator-1.1", 0)])
def test_an_actor_of_another_split_is_sent_back(name: str, split: int) -> None:
    head = committed()
    effects = rejoin(head, name, split)
    assert {to for to, _ in sent(effects, m.Reassign)} == {name}
    assert name not in head.state.members.by_name
    assert "has no place in this split" in refused(effects)[0]


def test_a_message_of_an_actor_of_the_old_split_is_answered_with_an_order_to_restart() -> None:
    effects = committed().on("generator-1.0", m.Heartbeat(0, None, ""), 9.0)
    assert {to for to, _ in sent(effects, m.Reassign)} == {"generator-1.0"}


def test_a_head_that_restarts_goes_on_with_the_split_that_is_on_disk() -> None:
    head = committed()
    rules = head.state.rules.in_split(head.state.split)
    fresh = Head(HeadState(rules, Numbers(None), incarnation=1, term=1, checkpoints=START), now=0.0)
    assert fresh.state.split == Split(2, 1, 1, 1)
    assert {to for to, _ in sent(joined(fresh, LEARNER), m.Reassign)} == {LEARNER}


def test_a_learner_that_dies_while_it_writes_puts_the_change_off() -> None:
    head = changing()
    hand_over(head)
    joined(head, "learner-0.1")
    assert not head.state.change.is_handing_over
    assert head.state.change.target == 2
    assert head.state.split == Split(1, 2)


def test_a_run_that_drains_keeps_its_split() -> None:
    head = changing()
    head.drain(0.0)
    assert head.state.change.target is None
    assert not head.state.members.by_name[SECOND].leaving


def test_a_run_that_ends_before_its_change_evaluates_on_all_generators() -> None:
    head, _ = trained_head(n_generators=2, schedule=((1, 2),), total_steps=2)
    assert head.state.members.by_name[SECOND].leaving
    uid = next(entry.uid for entry in head.state.ledger.live() if entry.holder != SECOND)
    train_one(head, 1, uid)
    assert head.state.phase is Phase.CLOSING
    head.tick(0.0)
    assert head.state.change.target is None
    assert not head.state.members.by_name[SECOND].leaving


@pytest.mark.parametrize(
    ("learners", "why"),
    [(0, "ranks may learn"), (3, "one generator is left"), (2, "one change of the split at a time")],
)
def test_a_split_that_cannot_be_had_is_refused(learners: int, why: str) -> None:
    head = changing()
    if "at a time" not in why:
        head.state.change.target = None
    with pytest.raises(ImpossibleEvent, match=why):
        head.split_changes.begin(learners)


def test_a_fixed_split_does_not_change() -> None:
    head, _ = trained_head()
    with pytest.raises(ImpossibleEvent, match="is fixed"):
        head.split_changes.begin(1)
