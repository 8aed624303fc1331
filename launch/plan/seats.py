"""Which actor a rank runs in each split of ranks (topology.adapt). Pure, but for `first_split`, `present_context`."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from areal_bus.config.adapt import is_adaptive, learner_counts, may_have, with_learners
from areal_bus.config.sections import Config, TopologyConfig
from areal_bus.core.parts.split import RankPool, Split
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.messages import Role
from areal_bus.storage import run_files
from launch.plan.topology import ActorId, RankPlan, check_count, count_actors, plan


@dataclass(frozen=True, slots=True)
class Seat:
    """The learner or generator of one rank, in any split."""

    learner: int | None  # its index when this rank learns; None: it never does
    generator: int | None  # its index when this rank runs a generator; None: it always learns, or only gives its GPU
    learner_gpus: tuple[int, ...] = ()
    generator_gpus: tuple[int, ...] = ()

    def actor(self, split: Split) -> ActorId | None:
        """Who runs here in this split; None: the rank gives its GPU to a generator."""
        if self.learner is not None and self.learner < split.learners:
            return ActorId(Role.LEARNER, self.learner)
        if self.generator is not None and self.generator < split.generators:
            return ActorId(Role.GENERATOR, self.generator)
        return None

    def parked(self, split: Split) -> ActorId | None:
        """The learner that other splits start on this rank, if this split starts no actor here; else None."""
        is_empty = self.actor(split) is None and self.learner is not None
        return ActorId(Role.LEARNER, self.learner) if is_empty and self.learner is not None else None

    def gpus(self, role: Role) -> tuple[int, ...]:
        return self.learner_gpus if role is Role.LEARNER else self.generator_gpus


def rank_pool(topology: TopologyConfig, n_ranks: int, *, context_parallel: int = 1) -> RankPool:
    """The ranks of a job of so many ranks, and which splits there are."""
    least, rewards = learner_counts(topology)[0], topology.rewards if topology.reward == "rank" else 0
    generators = (n_ranks - least - rewards) // topology.tensor_parallel
    divisor = math.lcm(topology.replicas, context_parallel)
    return RankPool(least, generators, topology.tensor_parallel, divisor)


def seats(places: Sequence[RankPlan], pool: RankPool) -> list[Seat | None]:
    """The seat of each rank; None for one of a reward. `places`: the plan with `pool.learners` learners."""
    found: list[Seat | None] = []
    n_members = [0] * pool.generators  # ranks of each generator so far
    for place in places:
        own = () if place.own_gpu is None else (place.own_gpu,)
        runs = next((actor for actor in place.actors if actor.role in (Role.LEARNER, Role.GENERATOR)), None)
        generator = place.member_of or (runs if runs is not None and runs.role is Role.GENERATOR else None)
        if generator is not None:
            member = n_members[generator.index]
            n_members[generator.index] += 1
            learner = pool.learners + (pool.generators - 1 - generator.index) * pool.width + member
            found.append(Seat(learner, None if place.member_of else generator.index, own, place.gpus))
        else:
            found.append(None if runs is None else Seat(runs.index, None, own))
    return found


def plan_ranks(topology: TopologyConfig, hosts: Sequence[str], *, learners: int | None = None) -> tuple[RankPlan, ...]:
    """The plan of each rank by hosts, with this many learners (None: as set). Raises ConfigError if it does not fit."""
    if not is_adaptive(topology):
        return plan(topology, hosts)
    check_count(topology, len(hosts))
    pool, n = rank_pool(topology, len(hosts)), topology.learners if learners is None else learners
    for wanted in learner_counts(topology):
        if why := pool.refusal(wanted):
            raise ConfigError(f"topology.adapt.schedule: {why}; {len(hosts)} ranks started")
    return in_split(smallest_plan(topology, hosts), pool, Split(n, pool.generators_at(n)))


def seat_of(rank: int, topology: TopologyConfig, hosts: Sequence[str]) -> Seat | None:
    """The seat of this rank; None where its actor never changes."""
    if not is_adaptive(topology):
        return None
    return seats(smallest_plan(topology, hosts), rank_pool(topology, len(hosts)))[rank]


def most_generators(topology: TopologyConfig, n_ranks: int) -> int:
    """The largest number of generators of the job in any split."""
    if not is_adaptive(topology):
        return count_actors(topology, n_ranks).generators
    return rank_pool(topology, n_ranks).generators


def smallest_plan(topology: TopologyConfig, hosts: Sequence[str]) -> tuple[RankPlan, ...]:
    return plan(with_learners(topology, learner_counts(topology)[0]), hosts)


def all_places(topology: TopologyConfig, hosts: Sequence[str]) -> tuple[RankPlan, ...]:
    """The ranks with every actor that each may run: a rank comes twice where it may learn and sample."""
    if not is_adaptive(topology):
        return plan(topology, hosts)
    pool, base = rank_pool(topology, len(hosts)), smallest_plan(topology, hosts)
    most = pool.learners + (pool.generators - 1) * pool.width
    return base + tuple(place for place in in_split(base, pool, Split(most, 1)) if place not in base)


def in_split(places: Sequence[RankPlan], pool: RankPool, split: Split) -> tuple[RankPlan, ...]:
    """The plan of each rank in this split. `places`: as for `seats`."""
    return tuple(map(_seated, places, seats(places, pool), [split] * len(places)))


def _seated(place: RankPlan, seat: Seat | None, split: Split) -> RankPlan:
    actor = None if seat is None else seat.actor(split)
    if seat is None or actor is None or actor in place.actors:
        return place
    others = tuple(other for other in place.actors if other.role is not Role.GENERATOR)
    return replace(place, actors=(*others, actor), gpus=seat.gpus(actor.role), member_of=None)


def first_split(config: Config, run: Path, n_ranks: int) -> dict[str, Any]:
    """The fields of the split at the job's start: of the settings, or of a resumed run with the same ranks. If it may
    change, RUN/split.json has it afterwards. Raises CheckpointError.
    """
    counts = count_actors(config.topology, n_ranks)
    split = Split(counts.learners, counts.generators)
    if not is_adaptive(config.topology):
        (run / run_files.SPLIT).unlink(missing_ok=True)
        return asdict(split)
    found = run_files.read_split(run)
    pool = rank_pool(config.topology, n_ranks, context_parallel=config.actor.context_parallel)
    if found is not None:
        before_pool, before = found
        if before_pool == pool and may_have(config.topology, before.learners):
            print(f"topology.adapt: goes on with the split of version {before.since}: {before}", flush=True)
            return asdict(before)
        split = replace(split, number=before.number + 1)
        why = "other ranks than before" if before_pool != pool else f"{before} are no longer allowed"
        print(f"topology.adapt: {why}, so the split of the settings holds: {split}", flush=True)
    run_files.write_split(run, pool, split)
    return asdict(split)


def present_context(context: Context, seat: Seat) -> Context | None:
    """The Context of the actor that this rank runs in the split of RUN/split.json; None if it runs none now.

    A file that cannot be read, or that a network file system shows as it was, leaves the actor as it is: the head sends
    one of another split back.
    """
    try:
        found = run_files.read_split(context.folder)
    except CheckpointError:
        return context
    if found is None or found[1].number < context.split:
        return context
    split = found[1]
    actor = seat.actor(split)
    if actor is None:
        return None
    return replace(
        context,
        role=str(actor.role),
        index=actor.index,
        n_learners=split.learners,
        n_generators=split.generators,
        split=split.number,
    )


def belongs(context: Context, now: Context | None) -> bool:
    """Whether a running actor still has its place: a generator that stays one does not restart."""
    if now is None or (context.role, context.index) != (now.role, now.index):
        return False
    return context.role != Role.LEARNER or context.split == now.split
