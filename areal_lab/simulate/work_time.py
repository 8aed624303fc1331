"""The work of actors over time, from their `spans` lines: what busy time would be if they always had a core."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from tools.run import Line

WAITS = {
    "head": ("s_wait",),
    "generator": ("s_idle",),
    "reward": ("s_idle",),
    "learner": ("s_wait_batch", "s_serve"),
}  # role -> labels of time without work
LEAST_RATE = 0.05  # of a window: one in which the actor had no core at all is an error of the measurement


@dataclass(frozen=True, slots=True)
class Window:
    """About a second of one actor."""

    begin: float
    end: float
    labels: Line
    busy_s: float  # with work to do
    cpu_s: float | None  # of all threads and child processes
    queued_s: float  # ready to run, and without a core

    @property
    def rate(self) -> float:
        """Work done in a second of busy time. A wait for a core costs an actor that sleeps meanwhile nothing."""
        if self.busy_s <= 0:
            return 1.0
        had_core_s = max(1e-9, self.busy_s - self.queued_s)
        computes = 1.0 if self.cpu_s is None else min(1.0, self.cpu_s / had_core_s)
        return max(LEAST_RATE, 1 - computes * self.queued_s / self.busy_s)

    @property
    def work_s(self) -> float:
        return self.busy_s * self.rate

    def worked_s(self, *labels: str) -> float:
        """Work with these labels."""
        return self.rate * float(sum(self.labels.get(label, 0.0) for label in labels))


def windows(lines: Iterable[Line], role: str) -> list[Window]:
    """The windows of one actor, in order."""
    found = []
    for line in lines:
        if line["event"] == "spans":
            lasted = sum(seconds for key, seconds in line.items() if key.startswith("s_"))
            busy = max(0.0, lasted - sum(line.get(label, 0.0) for label in WAITS[role]))
            queued = min(busy, line.get("cpu_wait_s", 0.0))
            found.append(Window(line["t"] - lasted, line["t"], line, busy, line.get("cpu_s"), queued))
    return found


class WorkClock:
    """Integrates a rate over the windows of an actor; outside of them the rate is 1."""

    def __init__(self, over: Sequence[Window], rates: Sequence[float]) -> None:
        self._ends = [window.end for window in over]
        self._begins = [window.begin for window in over]
        self._rates = list(rates)
        self._done = list(
            accumulate((w.end - w.begin) * r for w, r in zip(over, rates, strict=True))
        )  # by the end of each window

    def between(self, begin: float, end: float) -> float:
        """Seconds of work between two times of a busy actor."""
        return self._until(end) - self._until(begin)

    def _until(self, t: float) -> float:
        at = bisect_left(self._ends, t)
        done = self._done[at - 1] if at else 0.0
        if at == len(self._ends):
            return done + (t - self._ends[-1] if self._ends else t)
        before = t - self._begins[at]
        return done + before * self._rates[at] if before > 0 else done + (before if not at else 0.0)


def within(over: Iterable[Window], began: float, ended: float) -> list[Window]:
    return [window for window in over if window.begin >= began - 0.5 and window.end <= ended + 0.5]


def clock_of(over: Sequence[Window]) -> WorkClock:
    return WorkClock(over, [window.rate for window in over])


class Crowd:
    """How many actors compute at a time, from changes (time, +1 or -1): the share of other cores that is busy."""

    def __init__(self, changes: Iterable[tuple[float, int]], n_cores: int) -> None:
        ordered = sorted(changes)
        self.times = [t for t, _ in ordered]
        self._busy = list(accumulate(change for _, change in ordered))
        self._n_others = max(1, n_cores - 1) if n_cores else math.inf

    def share(self, t: float) -> float:
        """At this time, for an actor that is busy itself; 0 where the number of cores is not known."""
        at = bisect_right(self.times, t) - 1
        others = self._busy[at] - 1 if at >= 0 else 0
        return min(1.0, max(0, others) / self._n_others)

    def mean_share(self, begin: float, end: float) -> float:
        """Mean over this time."""
        inner = self.times[bisect_right(self.times, begin) : bisect_right(self.times, end)]
        marks = [begin, *inner, end]
        area = sum((b - a) * self.share(a) for a, b in pairwise(marks))
        return area / (end - begin) if end > begin else 0.0
