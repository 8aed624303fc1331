"""Who is given work: quick ways of the head, held against the plain ones that say what they mean."""

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.core.head import Head
from areal_bus.core.members.membership import Member, Membership, MemberState
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.transitions.scheduler import Scheduler
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario, draw


class PlainLeasing(Scheduler):
    """Sorts everybody with room anew for each group."""

    def lease_all(self, *, admitting: bool) -> None:
        if not self._has_work(admitting):
            return
        eligible = self._not_paused(self.state.eligible_generators())
        while any(self._lease_one(member, admitting=admitting) for member in least_loaded(eligible)):
            pass
        if admitting and self.rules.eta == 0:
            self._lease_shares(eligible)


class PlainMembership(Membership):
    """Looks at everybody."""

    def of(self, role: Role, *standings: MemberState, index: int | None = None) -> list[Member]:
        found = sorted((x for x in self.by_name.values() if x.role is role), key=lambda x: x.index)
        found = [x for x in found if index is None or x.index == index]
        return [x for x in found if not standings or x.standing in standings]


class PlainHead(Head):
    def __init__(self, *given: object, **named: object) -> None:
        super().__init__(*given, **named)  # type: ignore[arg-type]
        self.scheduler.__class__ = PlainLeasing
        self.state.members.__class__ = PlainMembership


def least_loaded(eligible: Iterable[Member]) -> list[Member]:
    return sorted((x for x in eligible if x.room > 0), key=lambda x: (x.load / x.capacity, x.index))


def story(scenario: Scenario, head_class: type[Head]) -> tuple[object, object]:
    ring = Ring(scenario, keeps_story=True, head_class=head_class)
    outcome = ring.run()
    return outcome, ring.world.story


@pytest.mark.slow
@settings(max_examples=60)
@given(
    seed=st.integers(0, 1 << 30),
    n_generators=st.none() | st.integers(4, 9),
    batch_size=st.integers(3, 12),
    n_samples=st.integers(1, 5),
    capacity=st.integers(1, 12),
    policy=st.sampled_from(StalenessPolicy),
)
def test_scheduler_leases_as_the_plain_ways_do_among_few_and_many_generators(
    seed: int, n_generators: int | None, batch_size: int, n_samples: int, capacity: int, policy: StalenessPolicy
) -> None:
    sizes = {"batch_size": batch_size, "n_samples": n_samples, "capacity": capacity, "total_steps": 3}
    scenario = replace(draw(seed, policy), **sizes)  # type: ignore[arg-type]
    if n_generators is not None:
        scenario = replace(scenario, n_generators=n_generators, joins_s=(0.0,) * n_generators)
    assert story(scenario, Head) == story(scenario, PlainHead)
