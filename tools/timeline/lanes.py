"""Lanes: tracks on which slices do not overlap. A slice gets the lowest lane that is free at its begin."""

import heapq


class Lanes:
    """Gives lanes to slices, which come in order of their begin."""

    def __init__(self) -> None:
        self.n = 0  # lanes so far
        self._busy: list[tuple[float, int]] = []  # end, lane
        self._free: list[int] = []

    def take(self, begin: float, end: float) -> int:
        """The lane of the slice, from 0."""
        while self._busy and self._busy[0][0] <= begin:
            heapq.heappush(self._free, heapq.heappop(self._busy)[1])
        if not self._free:
            heapq.heappush(self._free, self.n)
            self.n += 1
        lane = heapq.heappop(self._free)
        heapq.heappush(self._busy, (end, lane))
        return lane
