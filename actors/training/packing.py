"""Sequences into micro-batches under a token budget, and weights into even parts; knows only lengths."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack(lengths: Sequence[int], *, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Micro-batches as lists of indices, each index in exactly one, none empty, no total over `capacity`.

    Interface of the paper's Algorithm 1 (at least `k_min` micro-batches), placed best-fit-decreasing: the longest
    sequence first, into the fullest micro-batch that still holds it; O(n log n) but for the moves within one list.
    A sequence longer than the budget is a micro-batch of its own: it cannot be cut. Raises ValueError when `k_min`
    micro-batches cannot be filled.
    """
    if capacity < 1 or any(n < 1 for n in lengths):
        raise ValueError(
            f"capacity and lengths are at least 1: capacity {capacity}, shortest {min(lengths, default=1)}"
        )
    if lengths and k_min > len(lengths):
        raise ValueError(f"a micro-batch holds at least one sequence: {len(lengths)} cannot fill k_min = {k_min}")
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        n = lengths[index]
        at = bisect_left(free, (n, -1))
        if len(bins) < k_min or at == len(free):
            room, place = capacity, len(bins)
            bins.append([])
        else:
            room, place = free.pop(at)
        bins[place].append(index)
        if room > n:
            insort(free, (room - n, place))
    return bins
