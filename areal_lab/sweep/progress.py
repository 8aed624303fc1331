"""How far a sweep is, and how long it still takes. Pure."""

from collections import defaultdict
from collections.abc import Iterable
from math import fsum


class SweepProgress:
    """Counts jobs and their durations. Jobs of one kind are taken to last equally long."""

    def __init__(self, n_jobs: int, *, n_cores: int) -> None:
        self.n_jobs, self.n_done = n_jobs, 0
        self._n_cores = n_cores
        self._durations: dict[int, list[float]] = defaultdict(list)  # cores of a job -> seconds

    def add(self, cores: int, wall_s: float, *, is_done: bool) -> None:
        """A job on this number of cores has ended. The duration of one that failed says nothing on the others."""
        self.n_done += 1
        if is_done:
            self._durations[cores].append(wall_s)

    def left_s(self, waiting: Iterable[int], running: Iterable[tuple[int, float]]) -> float | None:
        """Seconds to the end; None before a job is done. `waiting`: cores of each job. `running`: cores and
        seconds since the start.
        """
        if not self._durations:
            return None
        parts = [(cores, max(self._mean(cores) - elapsed, 0.0)) for cores, elapsed in running]
        work = fsum(cores * s for cores, s in [*parts, *((cores, self._mean(cores)) for cores in waiting)])
        return max([work / self._n_cores, *(s for _, s in parts)])

    def _mean(self, cores: int) -> float:
        known = self._durations.get(cores) or [s for durations in self._durations.values() for s in durations]
        return fsum(known) / len(known)
