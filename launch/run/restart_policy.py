"""Decides when a crashed actor is restarted, and when a stalled head is reported or ends the job.

A stall timer ignores long gaps between two checks: then the supervisor itself was stopped.
"""

from dataclasses import dataclass

from actors.head.stall_monitor import StallAlarm
from areal_bus.config.sections import WatchdogConfig

BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)  # delay of the first, second, ... restart in a row without progress


class RestartBackoff:
    """The restarts of one actor in this job."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.n_crashes = 0  # in a row without progress
        self._n_starts = 0  # in a row without progress, requested restarts included

    def next_delay_s(self, *, crashed: bool, progressed: bool) -> float | None:
        """Seconds before the restart; None when the actor has crashed too often.

        `crashed`: false when it asked for the restart. `progressed`: whether its last incarnation made progress.
        """
        if progressed:
            self.n_crashes = self._n_starts = 0
        self.n_crashes += crashed
        if self.n_crashes > self.max_restarts:
            return None
        self._n_starts += 1
        return BACKOFF_S[min(self._n_starts, len(BACKOFF_S)) - 1]


MAX_GAP_S = 15.0  # between two checks


@dataclass(frozen=True, slots=True)
class StallFinding:
    """Result of one check."""

    stalled_s: float  # duration of the stall
    warns: bool = False  # a warning is due: after watchdog.progress_s, 2 and 4 times that, and so on
    aborts: bool = False  # watchdog.act_s is over
    recovered: bool = False  # it makes progress again after a warning


class StallTimer:
    """Measures how long a process has made no progress."""

    def __init__(self, settings: WatchdogConfig) -> None:
        self._warn, self._abort = StallAlarm(settings.progress_s), StallAlarm(settings.act_s)
        self._stalled_s = 0.0
        self._has_warned = False
        self._checked: float | None = None

    def update(self, now: float, *, moved: bool) -> StallFinding:
        """`moved`: whether there was progress since the last check."""
        gap_s, self._checked = 0.0 if self._checked is None else now - self._checked, now
        lasted_s = self._stalled_s + (gap_s if gap_s <= MAX_GAP_S else 0.0)
        self._stalled_s = 0.0 if moved else lasted_s
        warns, aborts = self._warn.is_due(self._stalled_s), self._abort.is_due(self._stalled_s)
        recovered, self._has_warned = moved and self._has_warned, (self._has_warned and not moved) or warns
        return StallFinding(lasted_s, warns=warns, aborts=aborts, recovered=recovered)
