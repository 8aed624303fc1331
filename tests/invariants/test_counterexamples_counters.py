"""Eq. 3 by counters, as it is printed, looks right and is not: after a resume, and with batches of another size.

The wrong rule is first seen to fail, then credits hold in the same story.
"""

from dataclasses import replace

import pytest

from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.members.membership import Member
from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.messages import BeginTerm, Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario
from tests.invariants.test_counterexamples import train


class Counters:
    """Eq. 3 as it is printed: floor((N - 1) / B) <= v + eta, with N all prompts generated so far."""

    def __init__(self, *, batch_size: int, eta: int) -> None:
        self.batch_size, self.eta = batch_size, eta
        self.n_generated = self.v = 0

    def may_admit(self) -> bool:
        return self.n_generated // self.batch_size <= self.v + self.eta

    def fill(self) -> int:
        """Admit all it lets in. Returns how many."""
        before = self.n_generated
        while self.may_admit():
            self.n_generated += 1
        return self.n_generated - before


class ByCount(Gate):
    """Wrong: eq. 3 as it is printed, by a count of prompts."""

    n_generated = 0

    @property
    def free(self) -> int:
        return (self.v + self.eta + 1) * self.batch_size - self.n_generated

    def may_admit(self, born: int) -> bool:
        return self.free > 0

    def admit(self, born: int) -> None:
        super().admit(born)
        self.n_generated += 1


class HeadByCount(Head):
    """It goes on at the checkpoint's version, and counts prompts from zero."""

    def __init__(self, *args: object, **more: object) -> None:
        super().__init__(*args, **more)  # type: ignore[arg-type]
        self.state.gate.__class__ = ByCount
        self._handlers[BeginTerm] = self._begin_term

    def _begin_term(self, member: Member, message: BeginTerm) -> None:
        gate = self.state.gate
        before, gate.n_generated = gate.n_generated, 0  # type: ignore[attr-defined]
        self.training.begin_term(member, message)
        self._count_after(before)

    def _count_after(self, before: int) -> None:
        """A term has begun; so many prompts were counted before."""


class HeadThatCountsOn(HeadByCount):
    """It goes on at the checkpoint's version, and counts on: with the prompts that the lost timeline had."""

    def _count_after(self, before: int) -> None:
        self.state.gate.n_generated = before  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kind", "role", "wrong", "broken"),
    [
        ("crash", Role.LEARNER, HeadByCount, "I1"),
        ("kill", Role.HEAD, HeadByCount, "I1"),  # the whole job
        ("crash", Role.LEARNER, HeadThatCountsOn, "I11"),
    ],
)
def test_a_ring_that_counts_is_flooded_or_shut_after_a_resume(
    kind: str, role: Role, wrong: type[Head], broken: str
) -> None:
    """B = 2, eta = 1, a checkpoint every 4 versions: the learner comes back at version 4, from version 7."""
    plan = Scenario(
        5, StalenessPolicy.PAPER, 2, 1, 1, 12, checkpoint_every=4, checkpoint_s=0.1, frontier_s=0.1, calm_s=500.0
    )
    whole = Ring(plan, head_class=wrong)
    whole.records = []
    assert not whole.run().violations  # without a resume it is the right rule
    (at_s,) = [at_s for at_s, line in whole.records if line.event is Event.UPDATE and line.fields["version"] == 7]

    resumed = replace(plan, faults=(Fault(kind, role, 0, at_s + 0.5, 5.0),))
    outcome = Ring(resumed, head_class=wrong).run()
    assert outcome.violations[0].invariant == broken
    ring = Ring(resumed)
    outcome = ring.run()
    assert not outcome.violations
    assert outcome.end is not None
    assert outcome.end.code == 0
    assert (ring.witness.n_terms, ring.witness.n_undone) == (2, 6)


def test_a_variable_batch_leaks_capacity_by_counters() -> None:
    wrong = Counters(batch_size=4, eta=1)
    live = wrong.fill()
    for _ in range(20):  # batches of one prompt
        live -= 1
        wrong.v += 1
        live += wrong.fill()
    assert live == 8 + 20 * 3

    starved = Counters(batch_size=4, eta=1)
    live = starved.fill()
    for _ in range(2):
        live -= 4  # filtered out, not trained: no version comes of them
    assert (live, starved.fill()) == (0, 0)

    gate = Gate(batch_size=4, eta=1)
    for _ in range(20):
        while gate.may_admit(gate.v):
            gate.admit(gate.v)
        assert gate.live == 8
        train(gate, min(gate._born))
    while gate.live:
        gate.refund(min(gate._born))
    assert gate.free == gate.limit == 8
