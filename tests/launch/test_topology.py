"""The topology: ranks to roles, hosts and GPUs."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.errors import ConfigError
from areal_bus.messages import Role
from launch.plan.topology import (
    ActorId,
    check_count,
    check_route,
    count_actors,
    min_ranks,
    plan,
    planned_hosts,
    ranks_by_gpu,
)

topologies = st.builds(
    TopologyConfig,
    learners=st.integers(1, 8),
    rewards=st.integers(1, 4),
    generators=st.none() | st.integers(1, 6),
    reward=st.sampled_from(["rank", "beside"]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    ranks_per_host=st.sampled_from([4, 8]),
    gpus_per_host=st.sampled_from([0, 1, 2, 8]),
    ranks_per_gpu=st.integers(1, 3),
)


def actors(places: object) -> Counter[ActorId]:
    return Counter(actor for place in places for actor in place.actors)  # type: ignore[attr-defined]


@given(topologies, st.integers(1, 64))
def test_a_plan_holds_every_actor_once_or_is_refused(topology: TopologyConfig, size: int) -> None:
    try:
        places = plan(topology, planned_hosts(topology, size))
    except ConfigError:
        return
    n = count_actors(topology, size)
    expected = {ActorId(Role.HEAD, 0)}
    for role, number in ((Role.LEARNER, n.learners), (Role.REWARD, n.rewards), (Role.GENERATOR, n.generators)):
        expected |= {ActorId(role, index) for index in range(number)}
    assert actors(places) == Counter(expected)
    assert ActorId(Role.HEAD, 0) in places[0].actors
    assert ActorId(Role.LEARNER, 0) in places[0].actors


@given(topologies, st.integers(1, 64), st.booleans())
def test_a_generator_stays_on_one_host_with_a_gpu_for_each_of_its_ranks(
    topology: TopologyConfig, size: int, is_alternating: bool
) -> None:
    hosts = [f"host-{rank % 2}" for rank in range(size)] if is_alternating else planned_hosts(topology, size)
    try:
        places = plan(topology, hosts)
    except ConfigError:
        return
    for place in places:
        for actor in place.actors:
            if actor.role is Role.GENERATOR:
                group = [place, *(other for other in places if other.member_of == actor)]
                assert len(group) == topology.tensor_parallel
                assert {other.host for other in group} == {place.host}
                assert place.gpus == tuple(p.own_gpu for p in group if p.own_gpu is not None)


@given(topologies, st.integers(1, 64))
def test_a_gpu_has_at_most_ranks_per_gpu_ranks_one_learner_and_no_reward(topology: TopologyConfig, size: int) -> None:
    try:
        places = plan(topology, planned_hosts(topology, size))
    except ConfigError:
        return
    for ranks in ranks_by_gpu(places).values():
        assert len(ranks) <= topology.ranks_per_gpu
        assert sum(actor.role is Role.LEARNER for place in ranks for actor in place.actors) <= 1
        generators = [place.member_of or actor for place in ranks for actor in place.actors or (None,)]
        owners = [actor for actor in generators if actor is not None and actor.role is Role.GENERATOR]
        assert len(set(owners)) == len(owners), "no two ranks of one generator"
    if topology.reward == "rank":
        assert all(p.own_gpu is None for p in places if p.actors and p.actors[0].role is Role.REWARD)


@given(topologies)
def test_min_ranks_are_enough_and_one_less_is_not(topology: TopologyConfig) -> None:
    least = min_ranks(topology)
    check_count(topology, least)
    with pytest.raises(
        ConfigError, match=rf"^too few ranks: {least - 1} started, and the topology (?:needs at least|has) {least} "
    ):
        check_count(topology, least - 1)


@pytest.mark.parametrize(
    ("topology", "hosts", "fault"),
    [
        ({"ranks": 8}, "aaaa", r"^too few ranks: 4 started, and topology\.ranks is 8; start with -np 8"),
        ({"ranks": 4, "generators": 5}, "aaaa", "^too few ranks: 4 started, .* has 7 .* start with -np 7"),
        ({"tensor_parallel": 2}, "aaaaaaa", "^mismatch of ranks: 5 are left for generators, .* start with -np 6 or 8"),
        ({"reward": "beside", "tensor_parallel": 2}, "aab", "must be on one host: a has 1 ranks"),
        ({"gpus_per_host": 2}, "aaaaa", r"host a has topology\.gpus_per_host = 2"),
        ({"reward": "beside", "learners": 2, "gpus_per_host": 1, "ranks_per_gpu": 3}, "aaa",
         r"learner-0 and learner-1 would share GPU 0 of a; set topology\.learners to 1"),
        ({"reward": "beside", "gpus_per_host": 3, "ranks_per_gpu": 2, "tensor_parallel": 4}, "aaaaa",
         "generator-0 would get GPUs 1, 2, 0, 1 of a"),
        ({"reward": "beside", "gpus_per_host": 2, "ranks_per_gpu": 2}, "aaaaa",
         "ranks_per_gpu = 2 ranks share a GPU: host a has .* = 2 for at least 5"),
    ],
)  # fmt: skip
def test_ranks_that_do_not_fit_are_refused_with_the_number_that_does(
    topology: dict[str, Any], hosts: str, fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        plan(TopologyConfig.model_validate(topology), [*hosts])


@pytest.mark.parametrize(
    ("topology", "hosts", "elsewhere"),
    [
        ({}, ["a", "a", "b"], "generator-1 is on b, learner-0 on a"),
        ({"gpus_per_host": 2}, ["a", "a"], "generator-0 is on GPU 1, learner-0 on GPU 0"),
    ],
)
def test_weights_cannot_be_shared_with_generators_on_another_host_or_gpu(
    topology: dict[str, Any], hosts: list[str], elsewhere: str
) -> None:
    sections = {"model": {"scratch": {}}, "data": {"task": "sums"}, "topology": {"reward": "beside"} | topology}
    config = Config.model_validate(sections | {"weights": {"route": "shared"}})
    with pytest.raises(ConfigError, match=elsewhere):
        check_route(config, plan(config.topology, hosts))
    auto = Config.model_validate(sections)
    check_route(auto, plan(auto.topology, hosts))


def test_weights_are_shared_within_a_host_or_a_gpu() -> None:
    sections = {"model": {"scratch": {}}, "data": {"task": "sums"}, "weights": {"route": "shared"}}
    pair = TopologyConfig(reward="beside", gpus_per_host=1, ranks_per_gpu=2)
    for topology in (TopologyConfig(), pair):
        check_route(
            Config.model_validate(sections | {"topology": topology}), plan(topology, ["a"] * min_ranks(topology))
        )
