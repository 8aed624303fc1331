"""The schedule of faults, and when a ring has recovered from them, by journals written by hand."""

import random
from itertools import islice
from typing import Any

import pytest

from areal_lab.chaos.fault_schedule import AppliedFault, FaultKind, planned_faults
from areal_lab.chaos.recoveries import Recoveries

KILL, STOP, CUT, RANK = FaultKind
Line = dict[str, Any]


def fault(kind: FaultKind, name: str, t: float = 10.0, until: float | None = None, of_server: bool = False) -> Any:
    return AppliedFault(kind, name, of_server, t, t if until is None else until)


def start(t: float, inc: int) -> Line:
    return {"t": t, "event": "start", "role": "head", "inc": inc}


def joined(t: float, name: str) -> Line:
    return {"t": t, "event": "joined", "name": name}


def member(t: float, name: str, state: str) -> Line:
    return {"t": t, "event": "member", "name": name, "state": state}


def update(t: float) -> Line:
    return {"t": t, "event": "update", "version": int(t)}


RING = [start(0.0, 0), *(member(1.0, f"{name}-0.0", "healthy") for name in ("learner", "generator", "reward"))]


def recovered(one: AppliedFault, *lines: Line) -> float | None:
    """When the ring of RING has recovered from it."""
    found = Recoveries()
    for line in RING:
        found.take(line)
    found.add(one)
    for line in lines:
        found.take(line)
    return found.recovered.get(one)


@pytest.mark.parametrize(("kinds", "rate"), [((KILL,), 6.0), ((KILL, STOP, CUT), 12.0)])
def test_kills_come_at_the_rate_that_is_asked_for_and_repeat_with_their_seed(
    kinds: tuple[FaultKind, ...], rate: float
) -> None:
    """Stops and cuts come half as often each."""
    faults = list(islice(planned_faults(random.Random(3), kinds, 6.0), 4000))
    assert faults == list(islice(planned_faults(random.Random(3), kinds, 6.0), 4000))
    assert faults != list(islice(planned_faults(random.Random(4), kinds, 6.0), 4000))
    assert 60 * len(faults) / faults[-1].at_s == pytest.approx(rate, rel=0.1)
    assert sum(one.kind is KILL for one in faults) * 60 / faults[-1].at_s == pytest.approx(6.0, rel=0.1)
    assert {one.kind for one in faults} == set(kinds)


G, R = "generator-0.0", "reward-0.0"
AGAIN = [start(12.0, 1), *(member(13.0, f"{name}-0.0", "healthy") for name in ("learner", "generator")), update(14.0)]
DEAD, BACK = member(10.2, G, "dead"), joined(12.0, "generator-0.1")
AWAY, HERE = member(10.1, R, "dead"), member(13.0, R, "healthy")


@pytest.mark.parametrize(
    ("one", "lines", "expected"),
    [
        (fault(KILL, G), [update(9.9), update(10.1), DEAD, update(11.0), BACK, update(13.0)], None),
        (fault(KILL, G), [update(10.1), DEAD, update(11.0), BACK, member(14.0, "generator-0.1", "healthy"),
                          update(15.0), update(16.0)], 15.0),
        (fault(CUT, G), [AWAY, update(11.0)], None),
        (fault(CUT, G), [AWAY, update(11.0), HERE, update(14.0)], 14.0),
        (fault(STOP, G, until=13.0), [update(11.0), update(14.0)], 14.0),  # over after its SIGCONT, noticed or not
        (fault(STOP, G, until=13.0), [update(11.0), member(12.9, G, "dead"), update(14.0), member(15.0, G, "healthy"),
                                      update(16.0)], 16.0),
        *((one, [update(10.1), *AGAIN, *more], expected)  # all must have joined the next incarnation of the head
          for one in (fault(KILL, "head-0.0"), fault(RANK, "rank-0"))
          for more, expected in (([], None), ([member(15.0, R, "healthy"), update(16.0)], 16.0))),
        (fault(CUT, R), [member(10.5, G, "left"), update(11.0)], 11.0),  # who has left is not waited for
    ],
)  # fmt: skip
def test_ring_recovers_at_the_first_update_after_which_every_actor_is_healthy_in_its_next_incarnation(
    one: AppliedFault, lines: list[Line], expected: float | None
) -> None:
    assert recovered(one, *lines) == expected


def test_recovery_times_are_by_kind_and_role_and_of_a_stop_from_its_sigcont() -> None:
    found = Recoveries()
    for line in RING:
        found.take(line)
    for one in (fault(STOP, "learner-0.0", until=12.0), fault(KILL, "generator-0.0", of_server=True)):
        found.add(one)
    found.add(fault(KILL, "generator-0.0", t=20.0))
    found.take(update(15.0))
    assert found.seconds == {"stop learner": [3.0], "kill server": [5.0]}
    assert found.disturbed == [(10.0, 15.0), (10.0, 15.0), (20.0, float("inf"))]
