"""Which groups of a batch go to which learner rank, and in what form; knows nothing of how the batch was chosen."""

import heapq
from collections.abc import Sequence

from areal_bus.messages import Scored, ShardItem


def split(weights: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Indices of `weights` for each rank, balanced by longest first; each share in ascending order."""
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    heap = [(0, 0, rank) for rank in range(n_ranks)]  # (tokens, groups, rank)
    for index in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
        tokens, n_groups, rank = heapq.heappop(heap)
        shares[rank].append(index)
        heapq.heappush(heap, (tokens + weights[index], n_groups + 1, rank))
    return [sorted(share) for share in shares]


def item(scored: Scored, *, step: int, clock: int, group: int, n_groups: int) -> ShardItem:
    """A scored trajectory as a learner rank gets it."""
    return ShardItem(
        step=step,
        clock=clock,
        group=group,
        n_groups=n_groups,
        uid=scored.uid,
        sample=scored.sample,
        reward=scored.reward,
        correct=scored.correct,
        finish=scored.finish,
        segments=scored.segments,
        spans=scored.spans,
        ids=scored.ids,
        logps=scored.logps,
        text=scored.text,
    )
