"""How long a guest may hold a lease: some times as long as the job's own generators need. Pure: no I/O."""

from collections.abc import Iterable

LEAST_S = 300.0  # longer than `bus.resend_s` and than the first request of a cold engine
TIMES = 4.0  # a guest may have slower hardware


class LeaseLimit:
    """Call `note` with each complete lease of an own generator."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def note(self, lasted_s: float) -> None:
        self._longest_s = max(self._longest_s, lasted_s)

    def seconds(self, under_way_s: Iterable[float]) -> float:
        """The limit now. `under_way_s`: how long own generators have held their present leases."""
        return max(LEAST_S, TIMES * max([self._longest_s, *under_way_s]))
