"""Packs sequences into micro-batches under a token budget."""

from bisect import bisect_left, insort
from collections.abc import Sequence

LONG = (0.25, 0.05)  # shares of the sequences, the longest ones, that are placed by best fit: fast, then thorough


def pack(lengths: Sequence[int], *, capacity: int, k_min: int = 1) -> list[list[int]]:
    """Micro-batches as lists of indices, each index in exactly one, none empty, no total over `capacity`.

    Interface of the paper's Algorithm 1 (at least `k_min` micro-batches). The longest sequences are placed
    best-fit-decreasing: the longest first, into the fullest micro-batch that still holds it. Then each micro-batch is
    filled with short ones, to the last token where two are found that add up to its room: with many sequences there
    are as few micro-batches as the tokens ask for. No two of them could be one. A sequence longer than the budget is a
    micro-batch of its own: it cannot be cut. Raises ValueError when `k_min` micro-batches cannot be filled.
    """
    if capacity < 1 or any(n < 1 for n in lengths):
        raise ValueError(
            f"capacity and lengths are at least 1: capacity {capacity}, shortest {min(lengths, default=1)}"
        )
    if lengths and k_min > len(lengths):
        raise ValueError(f"a micro-batch holds at least one sequence: {len(lengths)} cannot fill k_min = {k_min}")
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    bins = _tight(order, int(LONG[0] * len(order)), lengths, capacity)
    if (len(bins) - 1) * capacity >= sum(lengths):  # the tokens would fit one fewer
        bins = min(bins, _tight(order, int(LONG[1] * len(order)), lengths, capacity), key=len)
    return bins if len(bins) >= k_min else _best_fit(order, lengths, capacity, k_min)


def _tight(order: Sequence[int], n_long: int, lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Best fit for the first `n_long` sequences, the longest ones; the others fill the gaps."""
    bins = _best_fit(order[:n_long], lengths, capacity, 1)
    _fill(bins, order[n_long:], lengths, capacity)
    return bins


def _best_fit(order: Sequence[int], lengths: Sequence[int], capacity: int, k_min: int) -> list[list[int]]:
    """One after the other into the fullest micro-batch that holds it, once k_min are open."""
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room, bin), ascending
    for index in order:
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


def _fill(bins: list[list[int]], short: Sequence[int], lengths: Sequence[int], capacity: int) -> None:
    """All of `short` into the rooms of `bins` and, when these are full, into new ones, in place.

    Into a room go two that fill it, or else the longest that fits, again and again. Of two the shorter one is as long
    as can be: the shortest fill best and are kept for the end.
    """
    shelf = _Shelf(short, lengths)
    rooms = [capacity - sum([lengths[index] for index in part]) for part in bins]  # noqa: C419  a list is faster
    place = 0
    while shelf.up:
        if place == len(bins):
            bins.append([])
            rooms.append(capacity)
        part, room = bins[place], rooms[place]
        place += 1
        while room > 0:
            shorter = shelf.shorter_of_two(room)
            if shorter:
                part += [shelf.take(room - shorter), shelf.take(shorter)]
                break
            longest = shelf.longest(room)
            if not longest:
                break
            part.append(shelf.take(longest))
            room -= longest
        if not part:  # longer than the budget
            part.append(shelf.take(shelf.up.bit_length() - 1))


class _Shelf:
    """Sequences by length. The lengths are bits of two numbers, so that a few operations on these find the longest that
    fits, or two that add up to a sum.
    """

    def __init__(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """`order`: indices, longest first."""
        self._indices: dict[int, list[int]] = {}  # of each length
        for index in reversed(order):
            self._indices.setdefault(lengths[index], []).append(index)
        self._top = lengths[order[0]] if order else 0
        self.up = sum(1 << n for n in self._indices)  # bit n: there is one of length n
        self._down = sum(1 << self._top - n for n in self._indices)  # bit top - n: the same

    def longest(self, room: int) -> int:
        """Length of the longest that fits; 0 when none does."""
        return max((self.up & (2 << min(room, self._top)) - 1).bit_length() - 1, 0)

    def shorter_of_two(self, room: int) -> int:
        """Length of the shorter one of two that fill the room, the longest such; 0 when no two do."""
        shift = room - self._top
        if shift > self._top:
            return 0
        partners = self._down << shift if shift > 0 else self._down >> -shift
        pairs = self.up & partners & (2 << room // 2) - 1
        shorter = max(pairs.bit_length() - 1, 0)
        if shorter and 2 * shorter == room and len(self._indices[shorter]) < 2:
            shorter = max((pairs ^ 1 << shorter).bit_length() - 1, 0)
        return shorter

    def take(self, n: int) -> int:
        """Remove a sequence of this length and return its index."""
        indices = self._indices[n]
        index = indices.pop()
        if not indices:
            self.up ^= 1 << n
            self._down ^= 1 << self._top - n
        return index
