"""Trajectories that wait for others to go along: only while every slot is taken, and not for long."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from actors import generation
from actors.context import Pulse
from actors.delivery import GATHER_S, Delivery
from actors.generation import Generator
from actors.presence import Presence
from areal_bus import messages as m
from areal_bus.journal import Journal
from tests.faults.test_swaps import Arrived, Diary, Mail
from tests.test_generator_delivery import due, rewards, trajectory


def test_new_ones_wait_until_there_are_enough_or_the_first_has_waited_long() -> None:
    delivery = Delivery(resend_s=10, gather=3)
    delivery.directory(rewards("reward-0.0"))
    assert not delivery.gathers(0.0), "there is nothing to wait with"
    for uid in range(2):
        delivery.add(trajectory(uid))
        assert delivery.gathers(1.0 + uid * GATHER_S / 2)
    assert not delivery.gathers(1.0 + GATHER_S)
    assert due(delivery, 2.0) == [("reward-0.0", 0, True), ("reward-0.0", 1, True)]
    assert not delivery.gathers(2.0), "what was sent waits for no others"
    for uid in range(2, 5):
        assert uid == 2 or delivery.gathers(3.0), "counted from when the first of these came"
        delivery.add(trajectory(uid))
    assert not delivery.gathers(3.0), "three are enough"


def test_without_a_number_none_waits() -> None:
    delivery = Delivery(resend_s=10)
    delivery.add(trajectory(0))
    assert not delivery.gathers(0.0)


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
        yield trajectory(self._uid)


@pytest.mark.parametrize(("n_live", "expected"), [(4, [0, 0, 3, 0, 0, 3]), (3, [1, 1, 1, 1, 1, 1])])
def test_the_generator_lets_them_wait_only_while_every_slot_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_live: int, expected: list[int]
) -> None:
    monkeypatch.setattr(generation, "time", Still())
    mail, engine, delivery = Mail(), Diary(), Delivery(10.0, gather=3)
    delivery.directory(rewards("reward-0.0"))
    engine.version, engine.live = 0, [("", 0, 0, 0, 0)]
    journal = Journal(tmp_path, role="generator", index=0, incarnation=0)
    presence = Presence(mail, silent_s=60.0)  # type: ignore[arg-type]
    generator = Generator(
        mail, presence, engine, Ending(n_live), Arrived(), delivery, journal, Pulse(), n_slots=4  # type: ignore[arg-type]
    )  # fmt: skip
    n_left = []
    for _ in expected:
        mail.sent.clear()
        generator.turn()
        kinds = [type(message) for message in mail.sent]
        assert kinds == [m.Trajectory, m.Sampled] * (len(kinds) // 2), "the head hears of each as it leaves"
        n_left.append(len(kinds) // 2)
    assert n_left == expected


class Still:
    """A clock that stands."""

    @staticmethod
    def monotonic() -> float:
        return 5.0
