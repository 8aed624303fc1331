"""Trajectories reach a reward and are kept until acknowledged."""

from collections import Counter

from actors.generator.delivery import Delivery
from areal_bus.messages import PeerList, Trajectory
from areal_bus.transport.send_queue import ROOM_BYTES


def trajectory(uid: int, sample: int = 0, attempt: int = 0, evaluation: str = "", newest: int = 0) -> Trajectory:
    spans = [[0, 1], [newest, 1]]
    return Trajectory(
        uid, sample, attempt, evaluation, "generator-0.0", "stop", [[1, 2]], spans, 0.1, 0, b"", b"", "", "", "{}"
    )


def due(delivery: Delivery, now: float, waiting: dict[str, int] | None = None) -> list[tuple[str, int, bool]]:
    """`waiting`: bytes that a reward has not taken."""
    n_waiting = Counter(waiting or {}).__getitem__
    return [(reward, t.uid, first) for reward, t, first in delivery.due(now, n_waiting)]


def rewards(*names: str) -> PeerList:
    return PeerList(list(names), [f"ipc://{name}" for name in names])


def test_trajectories_wait_for_a_reward_and_go_round() -> None:
    delivery = Delivery(resend_s=10)
    for uid in range(3):
        delivery.add(trajectory(uid))
    assert due(delivery, 0.0) == []
    new, gone = delivery.update_rewards(rewards("reward-0.0", "learner-0.0", "reward-1.0"))
    assert (new, gone) == ({"reward-0.0": "ipc://reward-0.0", "reward-1.0": "ipc://reward-1.0"}, [])
    assert due(delivery, 0.0) == [("reward-0.0", 0, True), ("reward-1.0", 1, True), ("reward-0.0", 2, True)]
    assert due(delivery, 9.9) == []


def test_an_unacknowledged_trajectory_is_sent_to_another_reward() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0", "reward-1.0"))
    delivery.add(trajectory(0))
    delivery.add(trajectory(1))
    due(delivery, 0.0)
    delivery.ack(("", 1, 0, 0))
    assert due(delivery, 10.0) == [("reward-1.0", 0, False)]
    assert due(delivery, 20.0) == [("reward-0.0", 0, False)]
    delivery.ack(("", 0, 0, 0))
    assert delivery.n_pending == 0
    assert due(delivery, 99.0) == []


def test_trajectories_of_a_dead_reward_are_resent_at_once() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0", "reward-1.0"))
    delivery.add(trajectory(0))
    delivery.add(trajectory(1))
    due(delivery, 0.0)
    new, gone = delivery.update_rewards(rewards("reward-0.1", "reward-1.0"))
    assert (list(new), gone) == (["reward-0.1"], ["reward-0.0"])
    assert due(delivery, 0.1) == [("reward-1.0", 0, False)]


def test_the_only_reward_comes_back_as_a_new_incarnation_and_gets_everything_again_at_once() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0"))
    for uid in range(2):
        delivery.add(trajectory(uid))
    due(delivery, 0.0)
    assert delivery.update_rewards(rewards()) == ({}, ["reward-0.0"])
    delivery.add(trajectory(2))
    assert due(delivery, 0.1) == []
    delivery.update_rewards(rewards("reward-0.1"))
    assert due(delivery, 0.2) == [("reward-0.1", 0, False), ("reward-0.1", 1, False), ("reward-0.1", 2, True)]
    assert due(delivery, 0.3) == []


def test_a_reward_that_was_silent_and_is_listed_again_has_forgotten_nothing_that_others_got() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0", "reward-1.0"))
    delivery.add(trajectory(0))
    delivery.add(trajectory(1))
    due(delivery, 0.0)
    delivery.update_rewards(rewards("reward-1.0"))
    assert due(delivery, 0.1) == [("reward-1.0", 0, False)]
    assert delivery.update_rewards(rewards("reward-0.0", "reward-1.0")) == ({"reward-0.0": "ipc://reward-0.0"}, [])
    assert due(delivery, 0.2) == []


def test_a_full_reward_is_sent_nothing_and_its_trajectories_are_rerouted_or_wait() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0", "reward-1.0"))
    for uid in range(2):
        delivery.add(trajectory(uid))
    assert due(delivery, 0.0, {"reward-0.0": ROOM_BYTES, "reward-1.0": ROOM_BYTES}) == []
    room = {"reward-0.0": ROOM_BYTES, "reward-1.0": ROOM_BYTES - 1}
    assert due(delivery, 0.1, room) == [("reward-1.0", 0, True), ("reward-1.0", 1, True)]


def test_a_second_copy_is_not_queued_behind_unread_messages_of_a_reward() -> None:
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards("reward-0.0", "reward-1.0"))
    delivery.add(trajectory(0))
    assert due(delivery, 0.0) == [("reward-0.0", 0, True)]
    assert due(delivery, 10.0, {"reward-0.0": 1, "reward-1.0": 1}) == []
    assert due(delivery, 11.0, {"reward-1.0": 1}) == [("reward-0.0", 0, False)]
    delivery.update_rewards(rewards("reward-1.0"))
    assert due(delivery, 11.1, {"reward-1.0": 1}) == [("reward-1.0", 0, False)]  # the only copy


def test_groups_of_which_a_trajectory_has_a_version_that_does_not_count_are_lost() -> None:
    delivery = Delivery(resend_s=10)
    for t in [
        trajectory(0, newest=5),
        trajectory(1, sample=0, newest=5),
        trajectory(1, sample=1, newest=6),
        trajectory(2, evaluation="before", newest=7),
    ]:
        delivery.add(t)
    assert delivery.lost(lambda newest: newest is None or newest <= 5) == {("", 1, 0), ("before", 2, 0)}
    delivery.drop_all()
    assert delivery.n_pending == 0


def test_a_refunded_group_is_forgotten_and_an_evaluation_of_its_number_is_not() -> None:
    delivery = Delivery(resend_s=10)
    for t in [trajectory(0), trajectory(0, sample=1), trajectory(0, attempt=1), trajectory(0, evaluation="before")]:
        delivery.add(t)
    delivery.drop("", 0, 0)
    assert delivery.n_pending == 2
