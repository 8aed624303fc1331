"""A split of ranks that changes while the job runs: [topology.adapt], its rules, the settings of each split. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from areal_bus.config.section import Section

if TYPE_CHECKING:
    from areal_bus.config.sections import Config, TopologyConfig


class AdaptSettings(Section):
    schedule: tuple[tuple[int, int], ...] = ()
    """Learner ranks from given steps on: [[100, 2], [400, 1]] (docs/adapt.md)."""
    every_steps: int = Field(0, ge=0)
    """The head chooses the split; least updates between two changes; 0: off (docs/adapt.md)."""


def is_adaptive(topology: TopologyConfig) -> bool:
    """Whether ranks may change between learning and sampling."""
    adapt = topology.adapt
    return bool(adapt.schedule) or adapt.every_steps > 0


def learner_counts(topology: TopologyConfig) -> list[int]:
    """The numbers of learner ranks that the job may have, in ascending order."""
    adapt = topology.adapt
    planned = {1} if adapt.every_steps else set()
    return sorted({topology.learners, *planned, *(learners for _, learners in adapt.schedule)})


def may_have(topology: TopologyConfig, learners: int) -> bool:
    """Whether schedule or planner allow so many learner ranks, where there are ranks for them."""
    return topology.adapt.every_steps > 0 or learners in learner_counts(topology)


def with_learners(topology: TopologyConfig, learners: int) -> TopologyConfig:
    """The topology of one split, which stays: all other ranks sample."""
    return topology.model_copy(update={"learners": learners, "generators": None, "adapt": AdaptSettings()})


def settings_by_split(config: Config) -> dict[int, Config]:
    """Number of learner ranks -> the settings with that split; of a planner also a larger one."""
    topology, counts = config.topology, learner_counts(config.topology)
    if topology.adapt.every_steps:
        step = math.lcm(topology.tensor_parallel, topology.replicas, config.actor.context_parallel)
        most = _most_learners(topology)
        counts += [n for n in (topology.learners + step,) if most is None or n <= most]
    fixed = config.model_copy(update={"profile": type(config.profile)()})  # an actor of any split
    return {n: fixed.model_copy(update={"topology": with_learners(topology, n)}) for n in counts}


def adapt_rules(c: Config) -> Iterator[str]:
    """Rules for a split that changes."""
    adapt = c.topology.adapt
    if adapt.schedule and adapt.every_steps > 0:
        yield "the split follows topology.adapt.schedule or the planner: remove it, or topology.adapt.every_steps"
    if is_adaptive(c.topology):
        yield from _split(c)


def _most_learners(topology: TopologyConfig) -> int | None:
    """Learner ranks that leave one generator; None where the number of ranks is not set."""
    width = topology.tensor_parallel
    if topology.generators is not None:
        return topology.learners + (topology.generators - 1) * width
    rewards = topology.rewards if topology.reward == "rank" else 0
    return None if topology.ranks is None else topology.ranks - rewards - width


def _split(c: Config) -> Iterator[str]:
    topology = c.topology
    steps = [step for step, _ in topology.adapt.schedule]
    counts, width = learner_counts(topology), topology.tensor_parallel
    uneven = [n for n in counts if (n - counts[0]) % width]
    most = _most_learners(topology)
    key = "topology.adapt.schedule" if steps else "topology.adapt"
    if steps and (steps != sorted(set(steps)) or steps[0] < 1 or steps[-1] >= c.run.total_train_steps):
        rule = f"with ascending steps from 1 to {c.run.total_train_steps - 1}"
        yield f"{key} has pairs [step, learners] {rule}: its steps are {steps}"
    if counts[0] < 1:
        yield f"{key}: at least one rank learns; it has {counts[0]} learners"
    if most is not None and counts[-1] > most:
        yield f"{key}: at least one generator must be left; {counts[-1]} learners leave none: {most} may learn"
    if uneven:
        numbers, rule = ", ".join(map(str, [*uneven, counts[0]])), f"multiples of topology.tensor_parallel = {width}"
        yield f"numbers of learners {numbers} must differ by {rule}: a generator becomes {width} learner ranks"
    if c.engine.urls:
        remedy = "remove engine.urls (generators then start their servers), or topology.adapt"
        yield f"[topology.adapt] is refused, as servers of engine.urls do not end with a rank: {remedy}"
    if topology.ranks_per_gpu > 1:
        remedy = f"set topology.ranks_per_gpu = 1 (it is {topology.ranks_per_gpu}), or remove topology.adapt"
        yield f"[topology.adapt] needs a GPU for each rank, because a GPU holds one role at a time: {remedy}"
