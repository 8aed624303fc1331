"""A guest in a simulated ring of three generators sends each message beyond its limits, again and again.

`tests/areal_bus/core/parts/test_sample_limits.py` has results of leases that it holds.
"""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest

from areal_bus import messages as m
from areal_bus.authorization import authorise
from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.errors import WireError
from areal_lab.staleness.simulator.reward import SimulatedReward
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.world import HEAD
from tests.areal_bus.transport.test_authorization import OVER_A_LIMIT
from tests.faults.simulated import DONE, lines, scenario

GUEST = "generator-66.0"
EVERY_S = 0.1
CAPACITY = 4


class Guest:
    """Joins, holds weights if it `works`, and sends each message over each of its limits, without end."""

    def __init__(self, ring: Ring, *, works: bool) -> None:
        self.ring, self.works, self.n_said = ring, works, 0
        self._claims = cycle(OVER_A_LIMIT)
        ring.world.nodes[GUEST] = self
        self.say(m.Join(GUEST, "generator", 66, 0, "", 1, ""))
        self.say(m.Ready(2**62))
        self.again()

    def say(self, message: m.Message) -> None:
        self.n_said += 1
        self.ring.world.send(GUEST, HEAD, message)

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.PushBegin):
            self.answer(message)
        elif isinstance(message, m.Rejoin):
            self.say(m.Join(GUEST, "generator", 66, 0, "", 1, "", again=self.n_said))
            self.say(m.Ready(2**62))

    def answer(self, push: m.PushBegin) -> None:
        digest = self.ring.head.publisher._digests.get(push.version, "")
        if self.works:
            self.say(m.PushDone(push.push, push.version, digest, 0.0, 0.0))
        else:
            self.say(m.PushBroken(push.push, push.version, "it will not"))

    def again(self) -> None:
        for _ in range(5):
            self.say(m.Heartbeat(1, 0, ""))
        claim = next(self._claims)
        if isinstance(claim, m.Trajectory):
            self.ring.world.send(GUEST, "reward-0.0", replace(claim, generator=GUEST))
        else:
            self.say(claim)
        uid = self.ring.head.state.ledger.next_uid + self.n_said % 8 - 4
        self.say(m.SampleFailed(uid, 0, "", m.Refund.LOST_TIMELINE, "it says so"))
        self.say(m.Sampled(uid, 0, 0, "", 1))
        self.ring.world.timer(GUEST, EVERY_S, self.again)


def ring_of(*, guest: bool, works: bool = False, **changes: Any) -> Ring:
    ring = Ring(scenario(n_generators=3, total_steps=12, p_lost=0.0, p_twice=0.0, **changes))
    rules = replace(ring.head.state.rules, capacity=CAPACITY)
    ring.head.state.rules = ring.head.rollouts.rules = rules
    ring.records = []
    if guest:
        ring.world.at(5.0, lambda: Guest(ring, works=works))
    outcome = ring.run()
    assert not outcome.violations, outcome.violations[0]
    assert outcome.end == DONE
    return ring


class KeptRing(Ring):
    """Its guest completes pushes and takes leases, and never delivers. `reports`: it says that it has sampled them."""

    reports = False

    def _start(self, role: m.Role, index: int, incarnation: int) -> None:
        super()._start(role, index, incarnation)
        if index == 66:
            guest = self.witness.generators[f"generator-66.{incarnation}"]
            tell = guest._tell
            is_kept = (m.Sampled,) if not self.reports else ()
            guest._deliver = lambda *_, **__: None  # type: ignore[method-assign]
            guest._tell = lambda message: None if isinstance(message, is_kept) else tell(message)  # type: ignore[method-assign]


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("reports", [False, True])
def test_row_46_a_guest_that_never_delivers_keeps_no_credit_for_ever(reports: bool, policy: StalenessPolicy) -> None:
    ring = KeptRing(scenario(1, policy, n_generators=3, total_steps=30, p_lost=0.0, p_twice=0.0, n_problems=6))
    ring.reports, ring.records = reports, []
    ring.world.at(5.0, ring._start, m.Role.GENERATOR, 66, 0)
    outcome = ring.run()
    assert not outcome.violations, outcome.violations[0]
    assert outcome.end == DONE
    assert not lines(ring, Event.REFUND, reason="sampling_error")
    kept = lines(ring, Event.UNSAMPLED)
    assert {line["holder"].partition(".")[0] for line in kept} == {"generator-66"}
    assert all(line["error"].startswith("timed out") for line in kept)


def trained(ring: Ring) -> list[tuple[Any, ...]]:
    return [(x["step"], x["uid"], x["sample"]) for x in lines(ring, Event.TRAJECTORY)]


@pytest.fixture(autouse=True)
def door(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulator has no transport: what a reward's door refuses does not come in."""
    real = SimulatedReward.receive

    def receive(self: SimulatedReward, sender: str, message: m.Message) -> None:
        try:
            authorise(m.Role.REWARD, sender, message)
        except WireError:
            return
        real(self, sender, message)

    monkeypatch.setattr(SimulatedReward, "receive", receive)


@pytest.mark.parametrize("works", [False, True])
def test_row_46_a_guest_that_makes_every_wrong_claim_changes_no_batch(works: bool) -> None:
    alone, visited = ring_of(guest=False, eta=0), ring_of(guest=True, works=works, eta=0)
    assert trained(visited) == trained(alone)
    refused = {x["what"] for x in lines(visited, Event.REFUSED, sender=GUEST)}
    assert {"SampleFailed", "Sampled", "Ready", "Heartbeat", "Partial"} <= refused
