"""Stages: the rule of which one is in force, and rings whose groups change their size while actors die."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.core.events import Event
from areal_bus.core.parts.stages import SourceLimits, Stage, in_force, stage_at
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario, draw
from areal_lab.staleness.simulator.sources import SimulatedSource

STARTS = st.lists(st.integers(1, 50), unique=True, max_size=6).map(lambda starts: [0, *sorted(starts)])


@given(starts=STARTS, version=st.integers(0, 60))
def test_a_stage_is_in_force_from_its_first_version_to_the_next_one(starts: list[int], version: int) -> None:
    index = in_force(starts, version)
    assert starts[index] <= version < [*starts, 10**9][index + 1]
    assert in_force(starts, version + 1) - index in (0, 1)


@pytest.mark.parametrize(("starts", "version"), [([], 0), ([1], 1), ([0, 3], -1)])
def test_stages_begin_at_version_0(starts: list[int], version: int) -> None:
    with pytest.raises(ValueError, match="stages begin at version 0"):
        in_force(starts, version)


def staged(seed: int, sizes: tuple[int, int, int], starts: tuple[int, int]) -> Scenario:
    """A drawn schedule, with its faults, whose groups change their size twice."""
    plain = draw(seed)
    stages = tuple(Stage(start, n, 10, 100) for start, n in zip((0, *starts), sizes, strict=True))
    return replace(plain, stages=stages, n_samples=sizes[0], partial_groups=False, total_steps=5)


def mixed(seed: int, sizes: tuple[int, int]) -> Scenario:
    """A drawn schedule, with its faults, of two sources whose groups differ in size."""
    sources = tuple(SimulatedSource(name, 1.0, 3) for name in "ab")
    limits = tuple(SourceLimits(name, 1.0, n, 10) for name, n in zip("ab", sizes, strict=True))
    stages = (Stage(0, 2, 10, 100, limits),)
    plain = replace(draw(seed), sources=sources, window=None, n_rows=None, stages=stages)
    return replace(plain, partial_groups=False, total_steps=4)


@given(seed=st.integers(0, 1 << 30), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4)))
@settings(max_examples=20)
def test_invariants_hold_for_groups_whose_size_is_that_of_their_source(seed: int, sizes: tuple[int, int]) -> None:
    ring = Ring(mixed(seed, sizes))
    ring.records = []
    assert ring.run().violations == []
    lines = [record.fields | {"event": record.event} for _, record in ring.records]
    source = {line["uid"]: line["source"] for line in lines if line["event"] is Event.ADMIT}
    for line in lines:
        if line["event"] is Event.LEASE and line["attempt"] == 0:
            assert line["n"] == sizes["ab".index(source[line["uid"]])]


@pytest.mark.slow
@given(
    seed=st.integers(0, 1 << 30),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    starts=st.sampled_from([(1, 2), (1, 3), (2, 4)]),
)
def test_invariants_hold_across_stages(seed: int, sizes: tuple[int, int, int], starts: tuple[int, int]) -> None:
    """The witness counts each group by the version at which its prompt was admitted (I3, I4, I8)."""
    assert Ring(staged(seed, sizes, starts)).run().violations == []


def test_a_group_keeps_its_size_and_the_start_of_a_stage_is_journalled() -> None:
    ring = Ring(staged(3, (1, 3, 2), (1, 3)))
    ring.records = []
    assert ring.run().violations == []
    lines = [record for _, record in ring.records]
    begun = [(line.fields["stage"], line.fields["version"]) for line in lines if line.event is Event.STAGE]
    assert begun == sorted(set(begun))
    assert {stage for stage, _ in begun} == {0, 1, 2}
    sizes = {line.fields["uid"]: (line.fields["born"], line.fields["n"]) for line in lines if line.event is Event.LEASE}
    assert {n for _, n in sizes.values()} == {1, 2, 3}
    assert all(n == stage_at(ring.scenario.stages, born).n_samples for born, n in sizes.values())
