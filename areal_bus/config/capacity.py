"""Numbers that follow from the settings: samples per generator, rows of logits. Pure: no I/O."""

from __future__ import annotations

from typing import TYPE_CHECKING

from areal_bus.config.names.engines import kind_of

if TYPE_CHECKING:
    from areal_bus.config.sections import Config

from areal_bus.config.stages import largest, smallest_group


def slots(config: Config) -> int:
    """Concurrent samples of a generator; of agents one per process, since others would block."""
    n_slots, workflow = config.rollout.max_concurrent_rollouts, config.workflow
    return min(n_slots, workflow.agent.workers) if workflow.uses_endpoint else n_slots


def groups_waiting(config: Config) -> int:
    """Groups that a generator queues beyond its slots, so that none idles: two; one for agents and servers."""
    queues_here = not kind_of(config.rollout.engine).is_server
    return 2 if queues_here and not config.workflow.uses_endpoint else 1


def capacity(config: Config) -> int:
    """Samples that a generator requests from the head: its slots and its queued groups, of the largest stage."""
    return slots(config) + groups_waiting(config) * largest(config).gconfig.n_samples


def together(config: Config) -> int:
    """Trajectories sent together while all slots are busy: enough to lease the next group (one queued: half of it)."""
    n_samples = smallest_group(config)
    return n_samples if groups_waiting(config) > 1 else n_samples // 2


DELTA_VERSIONS = 8  # from which a member that missed pushes is brought up to date by a delta; older ones get all bytes
BUCKET_BYTES = 256 << 20  # of one broadcast of a push
LOGITS_MIB = 512.0  # of a micro-batch's logits (float32); a larger matrix is computed in chunks
TEACHER_COPIES = 6  # matrices of a chunk's tokens and words beside a teacher: logits of both, classes, slopes
NF4_BLOCK = 64  # numbers of a 4-bit weight with a scale of their own
NF4_BYTES = 0.5 + 4 / NF4_BLOCK  # of a number
PARTS = 8  # chunks of a logits matrix that has just reached its limit


def logits_chunk(n_tokens: int, vocabulary: int, limit_mib: float) -> int | None:
    """Tokens whose logits a learner computes at once; None: all, because their matrix (float32) is within the limit."""
    limit = int(limit_mib * (1 << 20))
    if 4 * n_tokens * vocabulary <= limit:
        return None
    return max(limit // (4 * vocabulary * PARTS), 1)
