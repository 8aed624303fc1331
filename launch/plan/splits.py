"""The split of ranks that a start begins with, and the one that a supervisor's actor belongs to (topology.adapt)."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from actors.runtime.context import Context
from areal_bus.config.adapt import is_adaptive, may_have
from areal_bus.config.sections import Config
from areal_bus.core.parts.split import Split
from areal_bus.errors import CheckpointError
from areal_bus.messages import Role
from areal_bus.storage import split_file
from launch.plan.seats import Seat, rank_pool
from launch.plan.topology import count_actors


def first_split(config: Config, run: Path, n_ranks: int) -> dict[str, Any]:
    """The fields of the split with which rank 0 starts the job: that of the settings, or, for a run that is resumed
    with the same ranks, the one that it had at its end. RUN/split.json has it afterwards. Raises CheckpointError.
    """
    counts = count_actors(config.topology, n_ranks)
    split = Split(counts.learners, counts.generators)
    if not is_adaptive(config.topology):
        split_file.remove(run)
        return asdict(split)
    found = split_file.read(run)
    pool = rank_pool(config.topology, n_ranks, context_parallel=config.actor.context_parallel)
    if found is not None:
        before_pool, before = found
        if before_pool == pool and may_have(config.topology, before.learners):
            print(f"topology.adapt: goes on with the split of version {before.since}: {before}", flush=True)
            return asdict(before)
        split = replace(split, number=before.number + 1)
        why = "other ranks than before" if before_pool != pool else f"{before} are no longer allowed"
        print(f"topology.adapt: {why}, so the split of the settings holds: {split}", flush=True)
    split_file.write(run, pool, split)
    return asdict(split)


def present_context(context: Context, seat: Seat) -> Context | None:
    """The Context of the actor that this rank runs in the split of RUN/split.json; None if it runs none now.

    A file that cannot be read, or that a network file system shows as it was, leaves the actor as it is: the head sends
    one of another split back.
    """
    try:
        found = split_file.read(context.folder)
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
