"""When a crashed actor is restarted, and when an actor that makes no progress is killed.

Time counts between two looks; a long gap between them does not: then it was the one who looks that stood still.
"""

from dataclasses import dataclass

from actors.head.stall_monitor import StallAlarm
from areal_bus.config.sections import WatchdogConfig

PAUSES_S = (0.0, 0.5, 1.0, 2.0, 4.0)  # before the first, second, ... start in a row without progress


class Restarts:
    """Of one actor, over all its incarnations in this start of the job."""

    def __init__(self, most: int) -> None:
        self.most = most  # launch.max_restarts
        self.n_crashes = 0  # in a row, without progress in between
        self._n_starts = 0  # in a row, those that it asked for included

    def after(self, *, crashed: bool, progressed: bool) -> float | None:
        """Seconds to wait before it is started again; None when it has crashed too often.

        `crashed` is false when it asked to come back, `progressed` true when the life that ended made any progress.
        """
        if progressed:
            self.n_crashes = self._n_starts = 0
        self.n_crashes += crashed
        if self.n_crashes > self.most:
            return None
        self._n_starts += 1
        return PAUSES_S[min(self._n_starts, len(PAUSES_S)) - 1]


GAP_S = 15.0  # between two looks


@dataclass(frozen=True, slots=True)
class StallFinding:
    """Of one look."""

    still_s: float  # how long it has stood still
    tells: bool = False  # it is to be said: after watchdog.progress_s, then at twice that, and so on
    acts: bool = False  # watchdog.act_s is over
    is_over: bool = False  # it moves again, and was said to stand still


class StallTimer:
    """Of one thing, which counts as moving when this begins."""

    def __init__(self, settings: WatchdogConfig) -> None:
        self._tell, self._act = StallAlarm(settings.progress_s), StallAlarm(settings.act_s)
        self._still_s = 0.0
        self._is_told = False
        self._looked: float | None = None

    def look(self, now: float, *, moved: bool) -> StallFinding:
        """`moved`: since the last look."""
        gap_s, self._looked = 0.0 if self._looked is None else now - self._looked, now
        lasted_s = self._still_s + (gap_s if gap_s <= GAP_S else 0.0)
        self._still_s = 0.0 if moved else lasted_s
        tells, acts = self._tell.is_due(self._still_s), self._act.is_due(self._still_s)
        is_over, self._is_told = moved and self._is_told, (self._is_told and not moved) or tells
        return StallFinding(lasted_s, tells=tells, acts=acts, is_over=is_over)
