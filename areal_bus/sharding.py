"""Which groups of a batch go to which learner rank, and in what form; knows nothing of how the batch was chosen."""

import heapq
from collections.abc import Sequence

from areal_bus.messages import Scored, ShardItem

EVEN = 1  # tokens by which shares may differ when nothing is exchanged any more
EXCHANGES = 4  # at most, a share: each evens out the two that differ most


def split(weights: Sequence[int], n_ranks: int) -> list[list[int]]:
    """Indices of `weights` for each rank, balanced; each share in ascending order.

    Longest first, each to the lightest share; then the heaviest and the lightest exchange what evens them out.
    """
    shares: list[list[int]] = [[] for _ in range(n_ranks)]  # longest first
    heap = list(range(n_ranks))  # tokens * n_ranks + rank: a number is compared faster than a pair
    for index in sorted(range(len(weights)), key=weights.__getitem__, reverse=True):
        lightest = heap[0]
        shares[lightest % n_ranks].append(index)
        heapq.heapreplace(heap, lightest + weights[index] * n_ranks)
    even_out(shares, weights)
    return [sorted(share) for share in shares]


def even_out(shares: list[list[int]], weights: Sequence[int]) -> None:
    """Exchange items between the heaviest and the lightest share, in place, while that brings them closer.

    The shares are in order of falling weight, and stay so.
    """
    tokens = [sum([weights[i] for i in share]) for share in shares]
    for _ in range(EXCHANGES * len(shares)):
        heavy = max(range(len(shares)), key=tokens.__getitem__)
        light = min(range(len(shares)), key=tokens.__getitem__)
        apart = tokens[heavy] - tokens[light]
        if apart <= EVEN:
            return
        pair = _closest_pair([weights[i] for i in shares[heavy]], [weights[i] for i in shares[light]], apart / 2)
        if pair is None:
            return
        mine, its = pair
        given = shares[heavy].pop(mine)
        taken = shares[light][its : its + 1]  # none: the item just moves
        shares[light][its : its + 1] = [given]
        shares[heavy] += taken
        for share in (shares[heavy], shares[light]):
            share.sort(key=weights.__getitem__, reverse=True)
        moved = weights[given] - sum(weights[i] for i in taken)
        tokens[heavy] -= moved
        tokens[light] += moved


def _closest_pair(heavy: Sequence[int], light: Sequence[int], wish: float) -> tuple[int, int] | None:
    """Places in both, each in falling order, whose difference is closest to `wish`; the place after the last of
    `light` stands for nothing in exchange. None when no exchange brings the two closer.
    """
    found, off = None, wish
    i = j = 0
    while i < len(heavy) and j <= len(light):
        difference = heavy[i] - (light[j] if j < len(light) else 0)
        if abs(difference - wish) < off:
            found, off = (i, j), abs(difference - wish)
        if difference > wish:
            i += 1
        else:
            j += 1
    return found


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
