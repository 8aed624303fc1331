"""Batches as they come over the bus, and a learner that outlives its head: what becomes of a batch that was being
handed out, and of whom the ranks ask next.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from actors.runtime import process as codes
from areal_bus import messages as m
from areal_bus.errors import ConfigError, ImpossibleEvent, Restart
from tests.actors.learner.link.conftest import WAIT_S, Crew, Rank, dealt, taken
from tests.support.polling import wait_until

CROWDS = pytest.mark.parametrize("size", [1, 3])


def test_batches_come_in_order_until_there_are_none(begun: Crew) -> None:
    (rank,) = begun.ranks
    begun.hand_out(0)
    begun.hand_out(1)
    begun.tell(m.NoBatch(2, False))
    batches = []
    for batch in rank.rollout:
        batches.append(batch)
        begun.train()
    assert [(b.step, b.clock, len(b.items), b.n_groups) for b in batches] == [(0, 0, 12, 3), (1, 1, 12, 3)]
    assert rank.rollout.ended
    requests = [begun.head.receive(10.0) for _ in range(3)]
    assert [r[1] for r in requests if r] == [m.BatchRequest(0), m.BatchRequest(1), m.BatchRequest(2)]


@pytest.mark.parametrize("last", [False, True])
def test_a_batch_that_is_not_trained_is_the_last_one_asked_for(begun: Crew, last: bool) -> None:
    (rank,) = begun.ranks
    begun.hand_out(0, last=last)
    assert rank.rollout.prepare_batch() is not None
    with pytest.raises(ConfigError, match=r"untrained batch: .* the batch of step 0 and did not train it"):
        rank.rollout.prepare_batch()
    assert begun.head.receive(10.0) == ("learner-0.0", m.BatchRequest(0))
    assert begun.head.receive(0) is None


@pytest.mark.parametrize(
    ("step", "n_items", "said"),
    [(0, 13, "13 items were announced, 12 came"), (1, 12, "waited for step 0, got step 1")],
)
def test_a_share_that_is_not_whole_or_of_another_step_is_refused(
    begun: Crew, step: int, n_items: int, said: str
) -> None:
    (rank,) = begun.ranks
    begun.hand_out(step, n_items=n_items)
    with pytest.raises(ImpossibleEvent, match=said):
        rank.rollout.prepare_batch()


@CROWDS
def test_without_another_head_a_batch_costs_one_agreement(crew: Crew) -> None:
    crew.begin()
    begun = crew.agreement.n_rounds
    for step in range(2):
        taking = crew.take_batches()
        crew.asked(step, 0)
        crew.is_trained(taking, seed=step, step=step)
        crew.train()
    assert crew.agreement.n_rounds == begun + 2
    assert crew.said == [[(0, False)]] * len(crew.ranks)
    crew.is_quiet()


@CROWDS
def test_a_batch_that_all_ranks_hold_is_trained_and_the_next_head_learns_the_new_version(crew: Crew) -> None:
    taking = crew.begin_a_batch()
    crew.tell(*crew.share(0, seed=1))
    crew.is_joined(1)
    assert taken(taking) == [dealt(0, seed=1)] * len(crew.ranks)
    assert all(rank.failover.has_new_head for rank in crew.ranks)
    assert crew.said == [[(0, False)]] * len(crew.ranks)  # in the middle of a step there is nothing to say
    crew.train()
    taking = crew.take_batches()
    crew.asked(1, 1)
    assert crew.said == [[(0, False), (1, True)]] * len(crew.ranks)
    crew.is_trained(taking, seed=2, step=1)
    crew.is_quiet()


@CROWDS
@pytest.mark.parametrize("seed", range(6))
def test_shares_that_not_all_ranks_hold_are_dropped_and_asked_for_again(crew: Crew, seed: int) -> None:
    """Up to three heads die while they hand out a batch. Each rank has another part of it, one perhaps the whole, and
    hears of the next head at another time.
    """
    draw, n_ranks, lives = random.Random(seed), len(crew.ranks), range(1, 2 + seed % 3)
    taking = crew.begin_a_batch()
    for life in lives:
        share = crew.share(0, seed=life)
        parts = [draw.choice([0, 3, 12, 13]) for _ in crew.ranks]
        parts[draw.randrange(n_ranks)] = draw.randrange(13)
        for index in draw.sample(range(n_ranks), n_ranks):
            crew.tell(*share[: parts[index]], to=index)
        for index in draw.sample(range(n_ranks), n_ranks):
            crew.is_joined(life, of=index)
        crew.asked(0, life)
    crew.is_trained(taking, seed=9)
    assert crew.said == [[(0, False), *((life, True) for life in lives)]] * n_ranks
    crew.is_quiet()


@CROWDS
def test_only_the_last_of_several_heads_during_a_step_is_sent_a_report(crew: Crew) -> None:
    taking = crew.begin_a_batch()
    crew.tell(*crew.share(0, seed=1))
    taken(taking)
    for life in (1, 2, 3):
        crew.tell(m.PeerList(["generator-0.1"], [""], life - 1))  # whenever anybody joins all are told who is there
        crew.is_joined(life)
    crew.tell(m.PeerList(["generator-0.1"], [""], 3))
    crew.train()
    taking = crew.take_batches()
    crew.asked(1, 3)
    crew.is_trained(taking, seed=2, step=1)
    assert crew.said == [[(0, False), (3, True)]] * len(crew.ranks)
    crew.is_quiet()


@pytest.mark.parametrize("size", [3])
def test_ranks_that_have_joined_different_heads_agree_on_the_newest(crew: Crew) -> None:
    taking = crew.begin_a_batch()
    crew.is_joined(1, of=0)
    for index in range(1, len(crew.ranks)):
        crew.is_joined(2, of=index)
    wait_until(lambda: crew.ranks[0].failover.life == 2)  # it is told of no batch before it has joined that one, too
    wait_until(lambda: crew.said == [[(0, False)], *[[(0, False), (2, True)]] * (len(crew.ranks) - 1)])
    names = [rank.name for rank in crew.ranks[1:]]
    heard = [crew.head.receive(WAIT_S) for _ in names]
    assert sorted(heard, key=str) == [(name, m.BatchRequest(0, 2)) for name in names]
    crew.is_joined(2, of=0)
    crew.asked(0, 2, of=0)
    crew.is_trained(taking, seed=2)
    assert crew.said == [[(0, False), (2, True)]] * len(crew.ranks)


# after the end


def come_to_the_end(crew: Crew, *, drained: bool = False) -> None:
    taking = crew.begin_a_batch()
    crew.tell(m.NoBatch(0, drained))
    assert [ending.result(WAIT_S) for ending in taking] == [None] * len(crew.ranks)


@CROWDS
def test_after_the_end_a_new_head_is_sent_the_completed_state(crew: Crew) -> None:
    come_to_the_end(crew)
    for life in (1, 2):
        crew.is_joined(life)
        assert all(rank.failover.has_new_head for rank in crew.ranks)
        outliving = crew.start(lambda rank: rank.rollout.report_end_again())
        crew.asked(0, life)
        crew.tell(m.NoBatch(0, False))
        assert [done.result(WAIT_S) for done in outliving] == [None] * len(crew.ranks)
        assert crew.said[0][-1] == (life, True)


@CROWDS
@pytest.mark.parametrize(
    ("drained", "said"), [(False, "this run had ended at 0"), (True, "continues from the checkpoint on disk")]
)
def test_after_the_end_a_head_with_another_batch_and_a_drained_run_send_all_ranks_back(
    crew: Crew, drained: bool, said: str
) -> None:
    come_to_the_end(crew, drained=drained)
    crew.is_joined(1)
    outliving = crew.start(lambda rank: rank.rollout.report_end_again())
    if not drained:
        crew.asked(0, 1)
        crew.tell(*crew.share(0, seed=1))
    for back in outliving:
        with pytest.raises(Restart, match=said):
            back.result(WAIT_S)
    crew.is_quiet()


# whether a head is outlived at all


@contextmanager
def bound(crew: Crew, *, lives_on: bool) -> Iterator[tuple[Rank, list[int]]]:
    """A learner that holds weights; lives of heads that it joins."""
    (rank,) = crew.ranks
    joined: list[int] = []
    rank.inbox.bind()
    if lives_on:
        rank.inbox.live_on(joined.append)
    crew.is_joined(0)
    yield rank, joined


def test_a_head_of_another_incarnation_is_joined_while_the_inbox_is_not_read(crew: Crew) -> None:
    with bound(crew, lives_on=True) as (rank, joined):
        crew.tell(m.Rejoin("only a member may speak", life=1), m.Rejoin("only a member may speak", life=1))
        wait_until(lambda: joined == [1, 1])  # the same Join twice is one
        crew.is_joined(1)
        rank.inbox.check()
        assert not rank.ended


@pytest.mark.parametrize(
    ("said", "lives_on"),
    [
        (m.Rejoin("its connection was broken", life=0), True),
        (m.Rejoin("no waypoint", life=1, anew=True), True),
        (m.Rejoin("learner-1.1 begins anew", life=0, anew=True), True),
        (m.Rejoin("only a member may speak", life=1), False),  # it is loading
    ],
)
def test_a_learner_goes_back_to_its_checkpoint(crew: Crew, said: m.Rejoin, lives_on: bool) -> None:
    """The same head has lost what nobody repeats; another may not know it; a learner that loads holds nothing."""
    with bound(crew, lives_on=lives_on) as (rank, joined):
        crew.tell(said)
        wait_until(lambda: rank.ended == [codes.RESTART])
        assert joined == []
        with pytest.raises(Restart, match=said.reason):
            rank.inbox.check()
