"""The inbox sorts what comes while the loop computes: terms, pushes, the end of a share, and orders to go back."""

import pytest

from areal_bus import messages as m
from tests.actors.learner.link.conftest import Crew
from tests.support.polling import wait_until


def test_a_rejoin_before_that_only_asks_for_another_join(begun: Crew) -> None:
    (rank,) = begun.ranks
    begun.tell(m.Rejoin("only a member may speak"))
    wait_until(rank.inbox.asked_to_rejoin)
    assert not rank.inbox.asked_to_rejoin()
    rank.inbox.bind()
    rank.inbox.check()
    assert not rank.ended


@pytest.mark.parametrize(
    "told",
    [
        [m.HeadHeartbeat(3, 10), m.PushBegin(0, 10, 0, [], "", 5.0, term=4), m.HeadHeartbeat(3, 10)],
        [m.HeadHeartbeat(3, 10), m.PushBegin(0, 10, 0, [], "", 5.0, term=4), m.HeadHeartbeat(5, 10)],
        [m.HeadHeartbeat(3, 10), m.HeadHeartbeat(4, 10)],
    ],
    ids=["older", "newer", "before the first push"],
)
def test_the_term_is_taken_from_pushes_and_before_the_first_from_heartbeats(begun: Crew, told: list[m.Message]) -> None:
    (rank,) = begun.ranks
    begun.tell(*told, m.NoBatch(0, False))
    assert rank.rollout.prepare_batch() is None
    assert rank.inbox.term == 4


def test_a_push_begins_while_the_inbox_is_not_read(begun: Crew) -> None:
    (rank,) = begun.ranks
    begin = m.PushBegin(0, 1, 0, ["generator-0.0"], "127.0.0.1:1", 5.0)
    begun.tell(begin, m.NoBatch(0, False))
    assert rank.rollout.prepare_batch() is None  # read after the push, by the same thread
    assert rank.begun == [begin]


def test_an_exception_of_another_thread_is_raised_by_the_loop(begun: Crew) -> None:
    (rank,) = begun.ranks
    rank.inbox.fail(OSError("disk is gone"))
    with pytest.raises(OSError, match="disk is gone"):
        rank.inbox.take()
