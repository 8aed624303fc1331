"""One chaos run: a calm beginning, faults at random times, recovery, and an orderly end at which nothing is open.

A job that ends by itself is at its end. After `minutes` it is drained instead, and then resumed for a few updates: its
end settles every prompt that the drain has left open.
"""

import math
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from areal_bus.errors import ArealBusError, ConfigError
from areal_lab.chaos import victims
from areal_lab.chaos.chaos_job import ChaosJob
from areal_lab.chaos.fault_schedule import STOPPED_S, AppliedFault, FaultKind, planned_faults
from areal_lab.chaos.ring_watch import RingWatch

CALM_UPDATES = 8  # before the first fault, which show the pace
CALM_S = 90.0  # from the first update to the first fault at most, while there is no checkpoint
LOOK_S = 0.1
STALLED_S = 600.0  # without an update; longer for slow updates
STALLED_UPDATES = 20.0
LAST_UPDATES = 2  # after the drain


class ChaosFailed(ArealBusError):
    """The job has failed or stalled: a finding, not an error of the input."""


@dataclass(frozen=True, slots=True)
class ChaosPlan:
    """The faults that are asked for."""

    kinds: Sequence[FaultKind]
    kills_per_minute: float
    minutes: float | None  # None: until the job ends by itself
    seed: int


@dataclass
class ChaosRun:
    """Runs a plan on a job. `say` prints a line; `show` gets a state of progress about once a second."""

    job: ChaosJob
    plan: ChaosPlan
    say: Callable[[str], None]
    show: Callable[[str], None]
    applied: list[AppliedFault] = field(default_factory=list)
    begins: float = 0.0  # when the first fault may come; 0: never
    ends: float = 0.0  # the last update of the disturbed time; after a failure the end
    failure: str = ""
    _stopped: list[tuple[float, int]] = field(default_factory=list)  # (when it goes on, process)
    _shown: float = 0.0

    def __post_init__(self) -> None:
        self.watch = RingWatch(self.job.run)
        self._dice = random.Random(self.plan.seed)
        self._kinds = list(self.plan.kinds)

    def run(self) -> None:
        """A failure of the job is kept in `failure`. Raises ConfigError without mpirun or permission for any fault."""
        try:
            self.job.start()
            self._run()
        except ChaosFailed as error:
            self.failure, self.ends = str(error), time.monotonic()
        finally:
            self._go_on(time.monotonic(), everyone=True)
            self.job.end()
            self.watch.look()
            self.say("the job has ended")

    def _run(self) -> None:
        if self._wait_for(lambda: self._is_calm_over, can_stall=False):
            self.begins = self.watch.last_update
            self.say(f"calm until update {self.watch.version}; faults begin")
            self._disturb()
            self._wait_for(lambda: not self.watch.recoveries.open)
            self.ends = self.watch.last_update
            if self._goes_on:
                self._settle()
        self._wait_for_end()

    @property
    def _is_calm_over(self) -> bool:
        """A learner that dies before the first checkpoint begins at version 0: docs/faults.md."""
        times = list(self.watch.survivors.updates.values())
        is_saved = self.watch.has_checkpoint or time.monotonic() - min(times, default=math.inf) > CALM_S
        return len(times) > CALM_UPDATES and is_saved

    def _disturb(self) -> None:
        """Apply the planned faults until the time is over or the job has ended."""
        began = time.monotonic()
        length_s = 60 * self.plan.minutes if self.plan.minutes is not None else math.inf
        for fault in planned_faults(self._dice, self.plan.kinds, self.plan.kills_per_minute):
            due = began + min(fault.at_s, length_s)
            if not self._wait_until(due) or fault.at_s >= length_s:
                return
            self._apply(fault.kind)

    def _settle(self) -> None:
        """Drain the job and go on to an end at which every prompt is trained or refunded."""
        self.say(f"drained at update {self.watch.version}, then resumed for {LAST_UPDATES} updates")
        self.job.drain()
        self._wait_for_end()
        last = self.watch.version + LAST_UPDATES
        self.job.resume(f"run.total_train_steps={last}", "evaluate.after=false")

    # faults

    def _apply(self, kind: FaultKind) -> None:
        if kind is FaultKind.RANK:
            self._kill_rank()
            return
        victim = victims.choose(self._dice, victims.victims(self.watch.status))
        lasts_s = self._dice.uniform(*STOPPED_S) if kind is FaultKind.STOP else 0.0
        if victim is None or kind not in self._kinds:
            return  # no process is running, or this kind is forbidden here
        t = time.monotonic()
        try:
            done = self._hit(kind, victim.pid, until=t + lasts_s)
        except PermissionError:
            self._kinds.remove(kind)
            if not self._kinds:
                raise ConfigError(f"forbidden fault: this user may not {kind} processes of the job here") from None
            self.say(f"{kind} is forbidden here: no more of these")
            return
        if done:
            self._add(AppliedFault(kind, victim.name, victim.is_server, t, t + lasts_s))

    def _hit(self, kind: FaultKind, pid: int, *, until: float) -> bool:
        """False when the process has ended, or has no connection."""
        if kind is FaultKind.CUT:
            return victims.cut(pid) > 0
        if not victims.send(pid, signal.SIGKILL if kind is FaultKind.KILL else signal.SIGSTOP):
            return False
        if kind is FaultKind.STOP:
            self._stopped.append((until, pid))
        return True

    def _kill_rank(self) -> None:
        """The job ends with its rank and is resumed, as a cluster requeues it."""
        ranks = self.job.supervisors()
        if not ranks:
            return
        rank = self._dice.randrange(len(ranks))
        t = time.monotonic()
        if victims.send(ranks[rank], signal.SIGKILL):
            self._add(AppliedFault(FaultKind.RANK, f"rank-{rank}", False, t, t))
            while self.job.is_up:
                self._pass()
            if not self.watch.is_over:  # its last update was done
                self.job.resume()

    def _add(self, fault: AppliedFault) -> None:
        self.applied.append(fault)
        self.watch.recoveries.add(fault)
        self.say(f"{fault.t - self.begins:.1f} s: {fault.kind} {'server of ' if fault.of_server else ''}{fault.name}")

    def _go_on(self, now: float, *, everyone: bool = False) -> None:
        """SIGCONT to processes that have stood still for long enough."""
        due = [(until, pid) for until, pid in self._stopped if everyone or until <= now]
        for one in due:
            self._stopped.remove(one)
            victims.send(one[1], signal.SIGCONT)

    # waiting

    @property
    def _goes_on(self) -> bool:
        return self.job.is_up and not self.watch.is_over

    def _wait_for(self, condition: Callable[[], bool], *, can_stall: bool = True) -> bool:
        """False when the job ends before. Raises ChaosFailed when no update finishes for long."""
        while self._goes_on:
            if condition():
                return True
            self._pass()
            if can_stall:
                self._check_stall()
        return False

    def _wait_until(self, due: float) -> bool:
        return self._wait_for(lambda: time.monotonic() >= due)

    def _wait_for_end(self) -> None:
        """Raises ChaosFailed unless the job ends with success."""
        while self.job.is_up:
            self._pass()
        if self.job.failure:
            raise ChaosFailed(self.job.failure)

    def _pass(self) -> None:
        time.sleep(LOOK_S)
        now = time.monotonic()
        self._go_on(now)
        self.watch.look()
        if now - self._shown >= 1.0:
            self._shown = now
            n_open, n_undone = len(self.watch.recoveries.open), self.watch.survivors.n_undone
            self.show(
                f"update {self.watch.version}, {n_undone} undone; {len(self.applied)} faults, {n_open} in recovery"
            )

    def _check_stall(self) -> None:
        times = list(self.watch.survivors.updates.values())
        mean_s = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0
        limit_s = max(STALLED_S, STALLED_UPDATES * mean_s)
        if time.monotonic() - self.watch.last_update > limit_s:
            raise ChaosFailed(f"timed out: no update within {limit_s:.0f} s, after update {self.watch.version}")
