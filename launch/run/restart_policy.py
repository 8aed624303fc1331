"""One actor of a rank as its supervisor sees it, its restarts after crashes, and the stall timer of a head."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

from actors.head.stall_monitor import StallAlarm
from actors.runtime.context import Context
from actors.runtime.user_failures import Fault
from areal_bus.config.sections import WatchdogConfig
from areal_bus.messages import Role
from launch.run.process import ActorProcess

COPY_TRIES = 2  # crashes in a row without progress, after which a learner goes back to its checkpoint on disk
BACKOFF_S = (0.0, 0.5, 1.0, 2.0, 4.0)  # delay of the first, second, ... restart in a row without progress


class RestartBackoff:
    """The restarts of one actor in this job."""

    def __init__(self, max_restarts: int) -> None:
        self.max_restarts = max_restarts
        self.n_crashes = 0  # in a row without progress
        self._n_starts = 0  # in a row without progress, requested restarts included

    def next_delay_s(self, *, crashed: bool, progressed: bool) -> float | None:
        """Seconds before the restart; None: too many crashes. `crashed`: false when the actor asked for the restart;
        `progressed`: whether its last incarnation made progress.
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


@dataclass(slots=True)
class SupervisedActor:
    """One actor of this rank over all its incarnations."""

    context: Context  # of the current or next incarnation
    gpus: Sequence[int]
    backoff: RestartBackoff
    stall_timer: StallTimer  # of the current incarnation; checked for the head only
    child: ActorProcess | None = None  # None: it waits for a restart, or is done
    due: float = 0.0  # time of the restart
    stopped: bool | None = None  # it ended with 0 and waits for RUN/summary.json; the value: whether it progressed
    is_done: bool = False
    is_parked: bool = False  # this rank runs no learner or generator in the present split
    misplaced_since: float | None = None  # when the split was seen to have another actor here
    fault: Fault | None = None  # where in the user's code the incarnation before ended, if it did
    memory: int | None = None  # of a learner: holds copies of its state (actors/learner/checkpoint/memory_copy.py)

    def take_memory(self) -> int | None:
        """The descriptor for the next incarnation; None for another role, without memfd, and after COPY_TRIES."""
        has_tried = self.backoff.n_crashes > COPY_TRIES  # what it goes back to undoes updates: copies are no progress
        if self.memory is None and self.context.role == Role.LEARNER and not has_tried:
            with contextlib.suppress(OSError, AttributeError):  # a Python may be built without memfd
                self.memory = os.memfd_create("areal-bus-learner")
        return self.memory

    def drop_memory(self) -> None:
        """Free all copies once no process has them open."""
        if self.memory is not None:
            os.close(self.memory)
            self.memory = None

    @property
    def place(self) -> str:
        return f"{self.context.role}-{self.context.index}"

    @property
    def is_head(self) -> bool:
        return self.context.role == Role.HEAD
