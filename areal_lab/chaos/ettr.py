"""ETTR: the share of wall time in which updates progress, from the times of updates and faults. Pure.

    ETTR = n * pace / wall

n: updates that survive, between the first fault's time and the end; wall: seconds in between; pace: mean seconds
between two surviving updates of the same run while nothing is disturbed. An update that is undone and done again
counts once. So the time of recoveries, of repeated updates and of a slower ring all count as lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import fsum


@dataclass(frozen=True, slots=True)
class TrainingShare:
    """The time that faults have cost."""

    n_updates: int  # that survive
    wall_s: float
    pace_s: float  # seconds of an undisturbed update

    @property
    def ettr(self) -> float:
        """In [0, 1]. A ring that catches up by work which it did meanwhile is not faster than undisturbed."""
        return min(1.0, self.n_updates * self.pace_s / self.wall_s)

    @property
    def lost_s(self) -> float:
        return self.wall_s * (1 - self.ettr)


def training_share(
    times: Sequence[float], disturbed: Sequence[tuple[float, float]], *, begins: float, ends: float
) -> TrainingShare | None:
    """`times`: of the surviving updates, in order; `disturbed`: (fault, recovery) each. The wall time goes from
    `begins` to `ends`, at which an update finished, unless the job failed. None without time or an undisturbed update.
    """
    gaps = [(a, b) for a, b in pairwise(times) if b <= ends]
    quiet = [b - a for a, b in gaps if not any(began < b and a < over for began, over in disturbed)]
    wall_s = ends - begins
    if not quiet or wall_s <= 0:
        return None
    return TrainingShare(sum(b > begins for _, b in gaps), wall_s, fsum(quiet) / len(quiet))
