"""Trajectories reach a reward and are kept until acknowledged."""

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.generator import loop as generation
from actors.generator.delivery import COALESCE_S, Delivery
from actors.generator.loop import Generator, LoopRules
from actors.runtime.context import HeartbeatState
from actors.runtime.head_session import ActorRuntime, HeadSession
from areal_bus import messages as m
from areal_bus.config.capacity import capacity, together
from areal_bus.config.sections import Config
from areal_bus.messages import PeerList, Trajectory
from areal_bus.storage.journal import Journal
from areal_bus.transport.send_queue import ROOM_BYTES
from areal_lab.simulate.sweep import Split, assumed_speed, schedules
from tests.faults.test_swaps import Arrived, Diary, Mail


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


def to_rewards(*names: str, n: int = 0) -> Delivery:
    """It holds n trajectories."""
    delivery = Delivery(resend_s=10)
    delivery.update_rewards(rewards(*names))
    for uid in range(n):
        delivery.add(trajectory(uid))
    return delivery


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
    delivery = to_rewards("reward-0.0", "reward-1.0", n=2)
    due(delivery, 0.0)
    delivery.ack(("", 1, 0, 0))
    assert due(delivery, 10.0) == [("reward-1.0", 0, False)]
    assert due(delivery, 20.0) == [("reward-0.0", 0, False)]
    delivery.ack(("", 0, 0, 0))
    assert delivery.n_pending == 0
    assert due(delivery, 99.0) == []


def test_trajectories_of_a_dead_reward_are_resent_at_once() -> None:
    delivery = to_rewards("reward-0.0", "reward-1.0", n=2)
    due(delivery, 0.0)
    new, gone = delivery.update_rewards(rewards("reward-0.1", "reward-1.0"))
    assert (list(new), gone) == (["reward-0.1"], ["reward-0.0"])
    assert due(delivery, 0.1) == [("reward-1.0", 0, False)]


def test_the_only_reward_comes_back_as_a_new_incarnation_and_gets_everything_again_at_once() -> None:
    delivery = to_rewards("reward-0.0", n=2)
    due(delivery, 0.0)
    assert delivery.update_rewards(rewards()) == ({}, ["reward-0.0"])
    delivery.add(trajectory(2))
    assert due(delivery, 0.1) == []
    delivery.update_rewards(rewards("reward-0.1"))
    assert due(delivery, 0.2) == [("reward-0.1", 0, False), ("reward-0.1", 1, False), ("reward-0.1", 2, True)]
    assert due(delivery, 0.3) == []


def test_a_reward_that_was_silent_and_is_listed_again_has_forgotten_nothing_that_others_got() -> None:
    delivery = to_rewards("reward-0.0", "reward-1.0", n=2)
    due(delivery, 0.0)
    delivery.update_rewards(rewards("reward-1.0"))
    assert due(delivery, 0.1) == [("reward-1.0", 0, False)]
    assert delivery.update_rewards(rewards("reward-0.0", "reward-1.0")) == ({"reward-0.0": "ipc://reward-0.0"}, [])
    assert due(delivery, 0.2) == []


def test_a_full_reward_is_sent_nothing_and_its_trajectories_are_rerouted_or_wait() -> None:
    delivery = to_rewards("reward-0.0", "reward-1.0", n=2)
    assert due(delivery, 0.0, {"reward-0.0": ROOM_BYTES, "reward-1.0": ROOM_BYTES}) == []
    room = {"reward-0.0": ROOM_BYTES, "reward-1.0": ROOM_BYTES - 1}
    assert due(delivery, 0.1, room) == [("reward-1.0", 0, True), ("reward-1.0", 1, True)]


def test_a_second_copy_is_not_queued_behind_unread_messages_of_a_reward() -> None:
    delivery = to_rewards("reward-0.0", "reward-1.0", n=1)
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


# trajectories wait for others to go along: only while every slot is taken, and not for long


def test_new_ones_wait_until_there_are_enough_or_the_first_has_waited_long() -> None:
    delivery = Delivery(resend_s=10, gather=3)
    delivery.update_rewards(rewards("reward-0.0"))
    assert not delivery.should_wait(0.0), "there is nothing to wait with"
    for uid in range(2):
        delivery.add(trajectory(uid))
        assert delivery.should_wait(1.0 + uid * COALESCE_S / 2)
    assert not delivery.should_wait(1.0 + COALESCE_S)
    assert due(delivery, 2.0) == [("reward-0.0", 0, True), ("reward-0.0", 1, True)]
    for uid in range(2, 5):  # with no turn between in which there was nothing to wait with
        assert uid == 2 or delivery.should_wait(3.0), "counted from when the first of these came"
        delivery.add(trajectory(uid))
    assert not delivery.should_wait(3.0), "three are enough"
    due(delivery, 3.0)
    assert not delivery.should_wait(3.0), "what was sent waits for no others"


def test_without_a_number_none_waits() -> None:
    delivery = Delivery(resend_s=10)
    delivery.add(trajectory(0))
    assert not delivery.should_wait(0.0)


class Ending:
    """Samples under way of which one ends each turn."""

    term = 0

    def __init__(self, n_live: int) -> None:
        self.n_live = n_live
        self._uid = 0

    def go_on(self) -> Iterable[m.Trajectory]:
        return ()

    def step(self) -> Iterator[m.Trajectory]:
        self._uid += 1
        self.n_live -= 1
        yield trajectory(self._uid)

    def partials(self, **_: object) -> Iterable[m.Partial]:
        return ()


class Decoding(Diary):
    """An engine with a sample under way, always."""

    def hold(self) -> bool:
        return True


def a_generator(folder: Path, mail: Mail, n_live: int, *, drains: bool = False) -> Generator:
    """It has 4 slots, and gathers by 3."""
    engine, delivery = Decoding(), Delivery(10.0, gather=3)
    delivery.update_rewards(rewards("reward-0.0"))
    engine.version, engine.live = 0, [("", 0, 0, 0, 0)]
    journal = Journal(folder, role="generator", index=0, incarnation=0)
    presence = HeadSession(mail, silent_s=60.0)  # type: ignore[arg-type]
    runtime = ActorRuntime(mail, presence, journal, HeartbeatState())  # type: ignore[arg-type]
    rules = LoopRules(n_slots=4, drains=drains)
    return Generator(runtime, engine, Ending(n_live), Arrived(), delivery, rules)  # type: ignore[arg-type]


class Clock:
    """A turn takes so many seconds."""

    def __init__(self, seconds_a_turn: float) -> None:
        self.now = 0.0
        self.step = seconds_a_turn

    def monotonic(self) -> float:
        return self.now


def n_sent(generator: Generator, mail: Mail, clock: Clock) -> int:
    """Trajectories that leave in the next turn."""
    mail.sent.clear()
    generator.turn()
    clock.now += clock.step
    kinds = [type(message) for message in mail.sent]
    assert kinds == [m.Trajectory, m.Sampled] * (len(kinds) // 2), "the head hears of each as it leaves"
    return len(kinds) // 2


@pytest.mark.parametrize(
    ("seconds_a_turn", "expected"),
    [
        (0.001, [0, 0, 3, 0, 0, 3, 1, 1]),
        (0.6 * COALESCE_S, [0, 0, 3, 0, 0, 3, 1, 1]),
        (1.1 * COALESCE_S, [0, 2, 0, 2, 0, 2, 1, 1]),
    ],
)
def test_the_generator_lets_them_wait_only_while_samples_wait_for_slots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds_a_turn: float, expected: list[int]
) -> None:
    clock, mail = Clock(seconds_a_turn), Mail()
    monkeypatch.setattr(generation, "time", clock)
    generator = a_generator(tmp_path, mail, n_live=10)  # 4 slots: after the sixth end no sample waits
    assert [n_sent(generator, mail, clock) for _ in expected] == expected


def test_they_do_not_wait_for_the_keys_of_new_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mail = Clock(0.0), Mail()
    monkeypatch.setattr(generation, "time", clock)
    generator = a_generator(tmp_path, mail, n_live=10)
    assert n_sent(generator, mail, clock) == 0
    mail.waiting.append(("head", m.PushBegin(0, 1, 0, [mail.name], "store", 1.0)))
    generator.turn()
    assert [type(message) for message in mail.sent] == [m.Trajectory, m.Sampled, m.PushDone]


def config_of(n_slots: int, n_samples: int, *, engine: str = "builtin", **sections: object) -> Config:
    rollout, gconfig = {"max_concurrent_rollouts": n_slots, "engine": engine}, {"n_samples": n_samples}
    return Config.model_validate({"rollout": rollout, "gconfig": gconfig, **sections})


def test_a_generator_requests_two_groups_in_addition_to_its_slots() -> None:
    config = config_of(48, 8)
    assert (capacity(config), together(config)) == (48 + 16, 8)


@pytest.mark.parametrize(
    ("sections", "n_slots"),
    [({"workflow": {"function": "agent", "agent": {"workers": 16, "function": "mine:agent"}}}, 16), ({}, 48)],
    ids=["agents", "a server"],
)
def test_agents_and_servers_ask_for_one(sections: dict[str, object], n_slots: int) -> None:
    """What would wait for a process here may find one at another generator; a server queues by itself."""
    config = config_of(48, 8, engine="builtin" if sections else "sglang", **sections)
    assert (capacity(config), together(config)) == (n_slots + 8, 4)


@given(st.integers(1, 256), st.integers(2, 32), st.sampled_from(["builtin", "vllm"]))
def test_the_planner_leases_as_the_head_does(n_slots: int, n_samples: int, engine: str) -> None:
    config = config_of(max(n_slots, n_samples), n_samples, engine=engine)
    pace = assumed_speed(config, train=100.0, step_s=0.0, push_s=0.0, reward_s=0.0, prompt_tokens=10)
    ((_, _, schedule),) = schedules(config, pace, [Split(1, 1)], [1])
    assert schedule.max_load == capacity(config) - n_samples, "another group fits"


@given(st.integers(1, 256), st.integers(2, 32), st.integers(0, 1 << 32))
def test_while_some_go_together_another_waits_for_the_next_slot(n_slots: int, n_samples: int, seed: int) -> None:
    """Leases are whole groups and come at once here; some go by the clock, before there are enough."""
    config, dice = config_of(max(n_slots, n_samples), n_samples), Random(seed)
    n_slots, room = config.rollout.max_concurrent_rollouts, capacity(config)
    leased = room // n_samples * n_samples  # samples that the head counts at this generator
    n_ended = 0  # of these, not told
    for _ in range(20 * n_samples):
        n_ended += 1
        assert leased - n_ended > n_slots, "another waits"
        if n_ended == together(config) or dice.random() < 0.1:
            leased, n_ended = leased - n_ended, 0
            leased += (room - leased) // n_samples * n_samples


def test_while_slots_are_let_run_empty_each_goes_as_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, mail = Clock(0.0), Mail()
    monkeypatch.setattr(generation, "time", clock)
    generator = a_generator(tmp_path, mail, n_live=10, drains=True)
    assert n_sent(generator, mail, clock) == 0
    mail.waiting.append(("head", m.PushBegin(0, 1, 0, [mail.name], "store", 1.0)))
    assert n_sent(generator, mail, clock) == 2
