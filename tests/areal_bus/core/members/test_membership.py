"""The silence limit follows the heartbeat intervals of this machine and ignores the head's own delay."""

from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus import messages as m
from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.console_reports import N_EACH, WITHIN_S, Deaths
from areal_bus.core.members.membership import CEILING, N_INTERVALS, Membership
from areal_bus.transport.receiver import ReceiveQueue
from tests.areal_bus.core.test_head import head_with, records

SILENT_S = 3.0
MOST_S = CEILING * SILENT_S
TICK_S = 0.1


class Crowd:
    """Members on a clock that the test turns."""

    def __init__(self, n: int) -> None:
        self.members = Membership(silent_s=SILENT_S)
        self.names = ["reward-0.0", *(f"generator-{i}.0" for i in range(n - 1))]
        for name in self.names:
            role, _, rest = name.partition("-")
            self.members.join(m.Join(name, role, int(rest.partition(".")[0]), 0, "", 1, ""), 0.0)
            self.members.ready(name, 4)
        self.now = 0.0

    def dead(self) -> list[str]:
        return [member.name for member, _ in self.members.silent(self.now)]

    def live(self, beats: dict[str, list[float]]) -> list[tuple[str, float]]:
        """Heartbeats at these times, ticks in between; who died, and when."""
        events = sorted((t, name) for name, times in beats.items() for t in times)
        died = []
        for t, name in events:
            while self.now + TICK_S < t:
                self.now += TICK_S
                died += [(who, self.now) for who in self.dead()]
            self.now = t
            self.members.heard(name, t)
        return died


def beats(gaps: Iterable[float]) -> list[float]:
    t, times = 0.0, []
    for gap in gaps:
        t += gap
        times.append(t)
    return times


def growing(factors: list[float]) -> list[float]:
    """Gaps of one member on a machine that slows down and recovers: none is three times the one before it."""
    gap, gaps = 1.0, []
    for factor in factors:
        gap = min(max(gap * factor, 0.5), MOST_S * 0.9)
        gaps.append(gap)
    return gaps


slowing = st.lists(st.floats(0.5, 2.5), min_size=4, max_size=24).map(growing)


@settings(max_examples=60, deadline=None)
@given(st.lists(slowing, min_size=2, max_size=6))
def test_no_member_is_declared_dead_while_gaps_grow_at_most_threefold(each: list[list[float]]) -> None:
    crowd = Crowd(len(each))
    plan = dict(zip(crowd.names, map(beats, each), strict=True))
    end = min(times[-1] for times in plan.values())
    died = crowd.live({name: [t for t in times if t <= end] for name, times in plan.items()})
    assert not died


@settings(max_examples=60, deadline=None)
@given(st.floats(0.5, MOST_S - 2.0), st.lists(st.floats(0.0, 1.0), min_size=3, max_size=8), st.floats(0.0, 1.0))
def test_a_machine_that_delays_all_members_at_once_causes_no_death(
    stall_s: float, phases: list[float], lag: float
) -> None:
    """They beat every second, nobody is scheduled for `stall_s`, then they come back one after the other."""
    crowd = Crowd(len(phases))
    plan = {}
    for i, (name, phase) in enumerate(zip(crowd.names, phases, strict=True)):
        before = [phase + k for k in range(5)]
        back = before[-1] + stall_s + lag * i / len(phases)
        plan[name] = [*before, *(back + k for k in range(8))]
    assert not crowd.live(plan)


@settings(max_examples=60, deadline=None)
@given(slowing, st.integers(3, 8))
def test_a_dead_member_is_found_within_the_stated_limit(gaps: list[float], n: int) -> None:
    """Three times its longest gap of late, at least bus.silent_s, at most ten times that."""
    crowd = Crowd(n)
    victim = crowd.names[1]
    last = beats(gaps)[-1]
    others = beats([1.0] * int(last + MOST_S + 2))
    died = crowd.live({name: others for name in crowd.names if name != victim} | {victim: beats(gaps)})
    (found,) = [t for who, t in died if who == victim]
    limit_s = min(max(SILENT_S, N_INTERVALS * max(gaps)), MOST_S)
    assert found - last <= limit_s + 2 * TICK_S


def test_one_member_that_is_slow_changes_nothing_for_the_others() -> None:
    crowd = Crowd(5)
    slow, dead = crowd.names[1], crowd.names[2]
    times = beats([1.0] * 40)
    plan = dict.fromkeys(crowd.names, times) | {slow: beats([1.0, 2.5, 6.0, 7.0, 7.0, 7.0]), dead: [20.0]}
    crowd.members.by_name[dead].heard = 19.0
    died = crowd.live(plan)
    assert [(who, round(t)) for who, t in died] == [(dead, 23)]


# the head's own delay


def deaths(effects: list[Effect]) -> list[str]:
    return [line["name"] for line in records(effects, Event.MEMBER) if line["state"] == "dead"]


def beat_all(head: Head, names: list[str], now: float) -> None:
    for name in names:
        head.on(name, m.Heartbeat(0, 0, ""), now)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.0, 120.0), min_size=1, max_size=6), st.integers(1, 4))
def test_a_head_that_stalls_or_reads_late_declares_no_member_dead(stalls: list[float], n_at_a_tick: int) -> None:
    """Everybody beats every 6 s. The head stalls, finds what came meanwhile and reads a few of it between two ticks."""
    head, _ = head_with(n_generators=3)
    names = list(head.state.members.by_name)
    now, sent_until, queue = 0.0, 0.0, list[tuple[float, str]]()
    died: list[str] = []
    for stall_s in stalls:
        for pause_s in (stall_s, *([2.0] * 8)):
            now += pause_s
            while sent_until + 6.0 <= now:
                sent_until += 6.0
                queue += [(sent_until, name) for name in names]
            for _ in range(n_at_a_tick):
                if queue:
                    _, name = queue.pop(0)
                    died += deaths(head.on(name, m.Heartbeat(0, 0, ""), now))
            died += deaths(head.tick(now, until=queue[0][0] if queue else now))
    assert not died


def test_a_head_that_is_always_late_detects_dead_members() -> None:
    head, _ = head_with(n_generators=3)
    names = [name for name in head.state.members.by_name if name != "generator-0.0"]
    now, died = 0.0, list[str]()
    for _ in range(40):
        now += 12.0  # of silent_s = 20
        beat_all(head, names, now)
        died += deaths(head.tick(now))
    assert died == ["generator-0.0"]


def test_messages_waiting_in_the_inbox_do_not_count_as_silence() -> None:
    """The moment moves when of each sender all before it were taken, or one since: not with what comes in."""
    inbox = ReceiveQueue(1 << 20)
    began = inbox.until
    inbox.put([("generator-0.0", m.Disconnected(), 0), ("generator-1.0", m.Disconnected(), 0)])
    inbox.mark_complete(began + 1.0)
    inbox.put([("generator-0.0", m.Disconnected(), 0)])
    inbox.mark_complete(began + 2.0)
    seen = []
    while inbox.take(0) is not None:
        seen.append(inbox.until - began)
    assert seen == [0.0, pytest.approx(2.0), pytest.approx(2.0)]  # of the first, another one is left
    inbox.mark_complete(began + 3.0)
    assert inbox.until - began == pytest.approx(3.0)


def test_an_overloaded_head_gives_deaf_and_silent_members_the_same_patience() -> None:
    head, _ = head_with(n_generators=3)
    names, deaf = list(head.state.members.by_name), "generator-0.0"
    for now in (15.0, 30.0, 45.0):  # of silent_s = 20: heartbeats come every 15 s
        for step in range(1, 4):
            head.tick(now - 15.0 + 5.0 * step)
        beat_all(head, names, now)
    died: dict[float, list[str]] = {}
    for now in (50.0, 60.0, 70.0, 80.0):
        died[now] = deaths(head.on(deaf, m.Heartbeat(0, 0, "", hears=False), now))
        beat_all(head, [name for name in names if name != deaf], now)
        head.tick(now)
    assert not died[50.0]  # it has waited 20 s itself, and the limit is longer now
    assert [names for names in died.values() if names] == [[deaf]]


# in the simulator


# what people read


def test_flapping_is_a_line_now_and_then_and_every_death_is_counted() -> None:
    news, told = Deaths(), list[str]()
    for tick in range(900):
        for i in range(6):
            name = f"generator-{(tick * 6 + i) % 500}.0"
            news.add(name, "silent for 3 s")
            news.back(name)
        told += news.tell(tick / 10)
    told += news.rest()
    assert len(told) <= 90 / WITHIN_S + 1
    assert told[1].startswith("500 members were taken 600 times for dead: silent for 3 s: ")
    assert told[1].endswith("; 500 of them are heard again")


def test_single_deaths_have_their_own_line_at_once() -> None:
    news = Deaths()
    for n in range(N_EACH):
        news.add(f"generator-{n}.0", "its connection is gone")
        assert news.tell(0.1 * n) == [f"generator-{n}.0 is taken for dead: its connection is gone"]
    news.add("reward-0.0", "silent for 3 s")
    assert not news.tell(1.0)
    assert news.tell(WITHIN_S) == ["reward-0.0 is taken for dead: silent for 3 s"]
