"""Ranks to roles, hosts and GPUs."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.config import TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.topology import Seat, check_count, counts, dry_hosts, least_ranks, plan

topologies = st.builds(
    TopologyConfig,
    learners=st.integers(1, 8),
    rewards=st.integers(1, 4),
    generators=st.none() | st.integers(1, 6),
    reward=st.sampled_from(["rank", "beside"]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    ranks_per_host=st.sampled_from([4, 8]),
    gpus_per_host=st.sampled_from([0, 8]),
)


def seats(places: object) -> Counter[Seat]:
    return Counter(seat for place in places for seat in place.seats)  # type: ignore[attr-defined]


@given(topologies, st.integers(1, 64))
def test_a_plan_holds_every_actor_once_or_is_refused(topology: TopologyConfig, size: int) -> None:
    try:
        places = plan(topology, dry_hosts(topology, size))
    except ConfigError:
        return
    n = counts(topology, size)
    expected = {Seat(Role.HEAD, 0)}
    for role, number in ((Role.LEARNER, n.learners), (Role.REWARD, n.rewards), (Role.GENERATOR, n.generators)):
        expected |= {Seat(role, index) for index in range(number)}
    assert seats(places) == Counter(expected)
    assert Seat(Role.HEAD, 0) in places[0].seats
    assert Seat(Role.LEARNER, 0) in places[0].seats


@given(topologies, st.integers(1, 64))
def test_a_generator_stays_on_one_host_with_a_gpu_for_each_of_its_ranks(topology: TopologyConfig, size: int) -> None:
    try:
        places = plan(topology, dry_hosts(topology, size))
    except ConfigError:
        return
    for place in places:
        for seat in place.seats:
            if seat.role is Role.GENERATOR:
                group = [place, *(other for other in places if other.member_of == seat)]
                assert len(group) == topology.tensor_parallel
                assert {other.host for other in group} == {place.host}
                assert place.gpus == tuple(p.own_gpu for p in group if p.own_gpu is not None)


@given(topologies, st.integers(1, 64))
def test_no_gpu_has_two_ranks_and_reward_ranks_have_none(topology: TopologyConfig, size: int) -> None:
    try:
        places = plan(topology, dry_hosts(topology, size))
    except ConfigError:
        return
    owned = Counter((p.host, p.own_gpu) for p in places if p.own_gpu is not None)
    assert all(number == 1 for number in owned.values())
    if topology.reward == "rank":
        assert all(p.own_gpu is None for p in places if p.seats and p.seats[0].role is Role.REWARD)


@given(topologies)
def test_the_fewest_ranks_are_enough_and_one_less_is_not(topology: TopologyConfig) -> None:
    least = least_ranks(topology)
    check_count(topology, least)
    with pytest.raises(ConfigError, match=f"{least} ranks.*: {least - 1} started"):
        check_count(topology, least - 1)


@pytest.mark.parametrize("size", [3, 4, 6])
def test_by_default_all_ranks_that_are_left_generate(size: int) -> None:
    assert counts(TopologyConfig(), size).generators == size - 2


def test_a_number_other_than_the_files_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"topology\.ranks says 8 ranks: 4 started; run mpirun -np 8"):
        check_count(TopologyConfig(ranks=8), 4)


def test_left_over_ranks_of_a_tensor_parallel_generator_are_refused() -> None:
    with pytest.raises(ConfigError, match="5 ranks are left for them; run mpirun -np 6 or 8"):
        check_count(TopologyConfig(tensor_parallel=2), 7)


def test_ranks_dealt_to_hosts_in_turn_keep_generators_on_one_host() -> None:
    topology = TopologyConfig(learners=2, reward="beside", tensor_parallel=2)
    places = plan(topology, ["a", "b"] * 3)
    assert [str(p.member_of or p.seats[0]) for p in places[2:]] == [
        "generator-0",
        "generator-1",
        "generator-0",
        "generator-1",
    ]


def test_a_generator_over_two_hosts_is_refused() -> None:
    with pytest.raises(ConfigError, match="stay on one host: a has 1 ranks"):
        plan(TopologyConfig(reward="beside", tensor_parallel=2), ["a", "a", "b", "b", "b"][:3])


def test_more_ranks_than_gpus_on_a_host_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"host a has topology\.gpus_per_host = 2"):
        plan(TopologyConfig(gpus_per_host=2), ["a"] * 5)
