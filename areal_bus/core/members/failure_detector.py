"""Adaptive failure detector: a member is dead after a silence of three heartbeat intervals, as recently observed.

On an overloaded machine all heartbeats come late. So the limit grows with the observed gaps between messages: with
the member's own longest gap, and with the median gap of all members. It lies between bus.silent_s and ten times that.
Times are arguments, without the time in which the head itself was not scheduled.
"""

from collections.abc import Collection

N_INTERVALS = 3  # heartbeats in a row that must be missing
CEILING = 10  # times bus.silent_s: no limit is longer
HALF_S = 30.0  # a long gap counts half after this time, a quarter after twice that
FEWEST = 3  # members whose gaps tell of the machine


class Patience:
    """The limits of one head's members."""

    def __init__(self, silent_s: float) -> None:
        self.least_s = silent_s
        self.most_s = CEILING * silent_s

    def gap(self, longest_s: float, gap_s: float) -> float:
        """The longest gap of late of one member, once another one of `gap_s` has ended."""
        decayed_s: float = longest_s * 0.5 ** (gap_s / HALF_S)
        return min(max(gap_s, decayed_s), self.most_s / N_INTERVALS)

    def limit(self, longest_s: float, usual_s: float) -> float:
        """Silence from which on a member is dead: by its own longest gap, and by `usual` of all members."""
        return min(max(self.least_s, N_INTERVALS * max(longest_s, usual_s)), self.most_s)


def usual(longest_s: Collection[float]) -> float:
    """The gap that at least half of all members have, those that last included: one slow member changes nothing."""
    return sorted(longest_s)[(len(longest_s) - 1) // 2] if len(longest_s) >= FEWEST else 0.0
