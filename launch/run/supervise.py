"""Supervises the actors of one rank: starts them, restarts dead ones after a pause, ends them with the job.

launch.max_restarts crashes in a row without progress end it. The job is over when RUN/summary.json exists.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.runtime.context import Context
from actors.runtime.process import BAD_INPUT, CRASHED, DONE, LEFT, OVER, RESTART
from actors.runtime.user_failures import read_fault
from areal_bus.config.sections import LaunchConfig, WatchdogConfig
from areal_bus.errors import ArealBusError
from areal_bus.messages import Role
from areal_bus.process import parent_death
from areal_bus.process.isolation import CHILD
from launch.plan.seats import Seat, belongs, present_context
from launch.run.job_end import (
    cause_of,
    describe_exit,
    job_failed,
    last_error,
    names_in,
    sender_of,
    summary_exists,
    write_cause,
)
from launch.run.process import ActorProcess, Signals, print_to_mpirun, resume_hint, start_actor
from launch.run.restart_policy import COPY_TRIES, RestartBackoff, StallTimer, SupervisedActor
from launch.run.runs import PID, SUMMARY

GRACE_S = 5.0  # for actors to exit before SIGKILL; mpirun and Slurm wait for longer
KILL_S = 2.0  # wait after SIGKILL
HEAD_ENDS_S = 3.0  # for the head to end the job and report it, when an actor of its rank has ended for good
REPEAT_S = 1.0  # a launcher and mpirun may both deliver one signal: a later one is a second request


@dataclass(frozen=True, slots=True)
class SupervisorTimes:
    """Waiting times of a supervisor."""

    poll_s: float = 1.0  # between checks of the run's folder and of the parent
    summary_s: float = 2.0  # a network file system may show RUN/summary.json this much later than the actors' Stop
    reassign_s: float = 30.0  # an actor that a change of the split ends, and that does not end, gets SIGKILL
    over_s: float = 10.0  # after the job's end remaining actors get SIGTERM: they may wait for a head that is gone


@dataclass(slots=True)
class Supervisor:
    """The actors of one rank. `command` starts an actor, which reads its Context as a line of standard input."""

    rank: int
    launch: LaunchConfig
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    run: Path = Path("/nowhere")  # the run's folder
    job: str = ""  # the id of this start; "": any
    n_ranks: int = 0  # of mpirun; 0: no mpirun
    command: Sequence[str] = (*CHILD[:1], *(["-O"] if not __debug__ else []), *CHILD[1:], "actors.runtime.start")
    at_end: Callable[[], None] = lambda: None  # called after SIGTERM to the actors
    at_poll: Callable[[], None] = lambda: None  # called about once a second
    waits_for_job: bool = False  # also without actors: a rank that waits in MPI_Finalize instead would spin
    seat: Seat | None = None  # who runs here in each split of ranks; None: the split is fixed
    is_guest: bool = False  # its actor joined a running job: the first signal asks it to leave
    times: SupervisorTimes = SupervisorTimes()
    actors: list[SupervisedActor] = field(default_factory=list)
    _drain: tuple[signal.Signals, float] | None = None  # signal and time of the first drain request
    _over_since: float | None = None
    _has_stopped: bool = False  # an actor of this rank has ended with 0, as after Stop
    _had_pid: bool = False  # RUN/pid has been there

    def start(self, context: Context, gpus: Sequence[int] = ()) -> None:
        """Raises ArealBusError when the process cannot be started."""
        actor = SupervisedActor(context, gpus, RestartBackoff(self.launch.max_restarts), StallTimer(self.watchdog))
        self.actors.append(actor)
        actor.child = start_actor(context, gpus, self._command, memory=actor.take_memory())

    def park(self, context: Context) -> None:
        """This rank runs no learner or generator in the present split, but may in another one."""
        actor = SupervisedActor(context, (), RestartBackoff(self.launch.max_restarts), StallTimer(self.watchdog))
        actor.is_parked = True
        self.actors.append(actor)

    def wait(self) -> int:
        """Wait until all actors are done, one has failed for good, or a signal ends the rank. Exit code of the rank."""
        launcher = parent_death.pid()
        try:
            with parent_death.end_is_noticed():
                with Signals() as signals:
                    while (code := self._poll_all(time.monotonic())) is None:
                        numbers = signals.wait(self._wait_time_s(time.monotonic()))
                        now, is_orphan = time.monotonic(), parent_death.is_gone(launcher)
                        if (code := self._handle_signals(numbers, now, is_orphan=is_orphan)) is not None:
                            break
                self.end()
            return code
        finally:
            for child in self._children():
                child.close()
            for actor in self.actors:
                actor.drop_memory()

    def end(self) -> None:
        """Send SIGTERM to all actors, and SIGKILL after GRACE_S."""
        self._signal(signal.SIGTERM)
        self.at_end()  # before the wait: mpirun may kill this process at any moment
        if not self._all_end(GRACE_S):
            self._signal(signal.SIGKILL)
            self._all_end(KILL_S)

    def _poll_all(self, now: float) -> int | None:
        """Check all actors, the run's folder and the drain deadline. Exit code of the rank when it is done."""
        self.at_poll()
        for actor in self.actors:
            if (code := self._poll_actor(actor, now)) is not None:
                return code
        over = self._is_over(now)
        if all(actor.is_done for actor in self.actors) and (over or self._head is not None or not self.waits_for_job):
            return self._exit_code()
        if over and now - (self._over_since or now) > self.times.over_s:
            return self._exit_code()
        if self._drain is not None and now - self._drain[1] > self.launch.drain_s:
            self._print(f"not drained within launch.drain_s = {self.launch.drain_s:g}: ends at once")
            return 128 + self._drain[0]
        return None

    def _poll_actor(self, actor: SupervisedActor, now: float) -> int | None:
        """Check one actor: restart it, or handle its end. Exit code when it ends the rank."""
        if actor.is_done:
            return None
        if actor.child is None:
            if self._is_over(now):
                actor.is_done = True
            elif actor.is_parked:
                if self._take_seat(actor):
                    actor.due = now
            elif now >= actor.due:
                return self._start_next(actor, now) if actor.stopped is None else self._restart_early_exit(actor)
            return None
        code = actor.child.process.poll()
        if code is None:
            self._check_place(actor, actor.child, now)
            return self._check_ticks(actor.child, actor.stall_timer, now) if actor.is_head else None
        progressed = actor.child.has_progressed()
        actor.child.close()
        actor.child = None
        if code in (BAD_INPUT, OVER):
            self._keep_cause(f"{actor.place} {describe_exit(code)}{last_error(actor.context)}")
            self._wait_for_head(actor)
            return code if code == BAD_INPUT else CRASHED
        if code == LEFT or self._is_over(now) or (code == DONE and actor.is_head):
            actor.is_done = True
            return None
        before = actor.context
        if not self._take_seat(actor):
            return None
        if actor.context is not before:
            actor.due = now
            return None
        if code == DONE:
            actor.stopped, actor.due, self._has_stopped = progressed, now + self.times.summary_s, True
            return None
        return self._restart(actor, describe_exit(code), crashed=code != RESTART, progressed=progressed)

    def _check_ticks(self, head: ActorProcess, stall_timer: StallTimer, now: float) -> int | None:
        """Report a head whose loop is stuck: its own watchdog is stuck, too."""
        found = stall_timer.update(now, moved=head.loop_has_ticked())
        stalled = f"head-0 has made no progress for {found.stalled_s:.0f} s"
        if found.aborts and self.watchdog.action == "abort":
            self._print(f'{stalled}: watchdog.action = "abort" ends the job')
            return CRASHED
        if found.warns:
            self._print(f"warning: {stalled}: all actors wait for it")
        if found.recovered:
            self._print(f"head-0 makes progress again, after {found.stalled_s:.0f} s")
        return None

    def _take_seat(self, actor: SupervisedActor) -> bool:
        """Give an idle actor its place in the present split, as its next incarnation. False: none; it is parked."""
        if self.seat is None or actor.context.role not in (Role.LEARNER, Role.GENERATOR):
            return True
        now = present_context(actor.context, self.seat)
        if now is None or (actor.is_parked and now is actor.context):  # the file tells nothing new
            if not actor.is_parked:
                self._print(f"{actor.place} gives its rank to a generator")
            actor.is_parked, actor.misplaced_since = True, None
            actor.drop_memory()
            return False
        if belongs(actor.context, now) and not actor.is_parked:
            return True
        self._print(f"runs {now.role}-{now.index} from now on", actor.place)
        actor.context = replace(now, incarnation=actor.context.incarnation + 1)
        actor.gpus = self.seat.gpus(Role(now.role)) if now.device == "cuda" else ()
        actor.backoff = RestartBackoff(self.launch.max_restarts)
        actor.drop_memory()
        actor.is_parked, actor.misplaced_since, actor.fault, actor.stopped = False, None, None, None
        return True

    def _check_place(self, actor: SupervisedActor, child: ActorProcess, now: float) -> None:
        """Kill an actor that has no place in the present split and does not end: the head has told it to."""
        if self.seat is None or actor.context.role not in (Role.LEARNER, Role.GENERATOR):
            return
        if belongs(actor.context, present_context(actor.context, self.seat)):
            actor.misplaced_since = None
        elif actor.misplaced_since is None:
            actor.misplaced_since = now
        elif now - actor.misplaced_since > self.times.reassign_s:
            self._print(f"{actor.context.name} does not end for the new split: it is killed")
            child.process.send_signal(signal.SIGKILL)

    def _restart(self, actor: SupervisedActor, how: str, *, crashed: bool, progressed: bool) -> int | None:
        """Plan the next incarnation. Exit code when the job must end instead."""
        who, most = actor.place, self.launch.max_restarts
        fault, before = read_fault(actor.context.folder / "logs", actor.context.name), actor.fault
        if crashed and fault is not None and fault.recurs(before):
            failed = f"{fault.place} failed twice without an update in between: the job ends"
            return self._give_up(who, f"{how}{last_error(actor.context)}; {failed}")
        actor.fault = fault
        pause_s = actor.backoff.next_delay_s(crashed=crashed, progressed=progressed)
        if pause_s is None:
            often = f"that is {most + 1} in a row without progress in between, and " if most else ""
            return self._give_up(who, f"{how}{last_error(actor.context)}; {often}launch.max_restarts is {most}")
        if actor.backoff.n_crashes > COPY_TRIES:
            actor.drop_memory()
        actor.context = replace(actor.context, incarnation=actor.context.incarnation + 1)
        actor.due = time.monotonic() + pause_s
        again = f"starts again in {pause_s:g} s as" if pause_s else "started again as"
        self._print(f"{how}; {again} {actor.context.name}", who)
        return None

    def _give_up(self, who: str, why: str) -> int:
        self._print(why, who)
        self._keep_cause(f"{who} {why}")
        return CRASHED

    def _keep_cause(self, text: str) -> None:
        write_cause(self.run, self.job, f"rank {self.rank}: {text}")

    def _restart_early_exit(self, actor: SupervisedActor) -> int | None:
        """Restart an actor that ended with 0 although the job is not over."""
        progressed, actor.stopped = bool(actor.stopped), None
        how = "ended with exit code 0 before the job was over"
        return self._restart(actor, how, crashed=True, progressed=progressed)

    def _start_next(self, actor: SupervisedActor, now: float) -> int | None:
        if not self._take_seat(actor):
            return None
        try:
            memory = actor.take_memory()
            actor.child = start_actor(actor.context, actor.gpus, self._command, memory=memory)
            actor.stall_timer = StallTimer(self.watchdog)
        except ArealBusError as error:
            return self._restart(actor, str(error), crashed=True, progressed=False)
        if actor.is_head and self._drain is not None:  # repeat the drain request for the new incarnation
            actor.child.process.send_signal(signal.SIGUSR1)
        return None

    def _handle_signals(self, numbers: Sequence[signal.Signals], now: float, *, is_orphan: bool) -> int | None:
        """The first signal may request a drain, the next one ends the rank. Exit code when it ends."""
        if is_orphan:
            return 128 + signal.SIGTERM
        for number in numbers:
            if self._drain is None and (number == signal.SIGUSR1 or self._requests_drain(number)):
                self._begin_drain(number, now)
            elif self._drain is None or number != self._drain[0] or now - self._drain[1] > REPEAT_S:
                self._print_resume_hint(number)
                return 128 + number
        return None

    def _requests_drain(self, number: signal.Signals) -> bool:
        """Whether SIGTERM requests a drain: without mpirun, which kills its ranks 0.25 s after it."""
        has_time = self.launch.bootstrap == "env" and not self.n_ranks
        return self.is_guest or (number == signal.SIGTERM and has_time)

    def _begin_drain(self, number: signal.Signals, now: float) -> None:
        self._drain = number, now
        if self.is_guest:
            what = "leaves when it has no more work; a second signal ends it at once"
            self._print(f"{sender_of(number, self.n_ranks)}: {what}")
            for child in self._children():
                child.process.send_signal(signal.SIGUSR1)
        head = self._head
        if head is None:
            return  # the head's rank forwards it
        what = f"writes a checkpoint and ends within launch.drain_s = {self.launch.drain_s:g} s"
        self._print(f"{sender_of(number, self.n_ranks)}: drains: {what}; a second signal ends it at once")
        if head.child is not None:
            head.child.process.send_signal(signal.SIGUSR1)

    def _print_resume_hint(self, number: signal.Signals) -> None:
        """The last line of a job that a signal ends; where another rank has failed, its cause comes last."""
        if self._head is None:
            return
        hint, cause = resume_hint(self.run, self.n_ranks), cause_of(self.run, self.job)
        print_to_mpirun(f"rank {self.rank}: {'' if cause else f'{sender_of(number, self.n_ranks)}: '}{hint}")
        if cause:
            print_to_mpirun(f"the job ended because of {cause}")

    def _wait_for_head(self, ended: SupervisedActor) -> None:
        """Wait for the head of this rank, which learns of the failure itself, to end the job."""
        head = self._head
        if head is not None and head is not ended and head.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.child.process.wait(HEAD_ENDS_S)

    @property
    def _command(self) -> Sequence[str] | None:
        """None: actors are forks of this process."""
        return None if self.launch.start == "fork" else self.command

    @property
    def _head(self) -> SupervisedActor | None:
        return next((actor for actor in self.actors if actor.is_head), None)

    def _is_over(self, now: float) -> bool:
        if self._over_since is None and self._has_ended():
            self._over_since = now
        return self._over_since is not None

    def _has_ended(self) -> bool:
        """Whether the job is over: by its summary; if the disk took none, by the end of the head."""
        names = names_in(self.run)
        self._had_pid = self._had_pid or PID in names
        is_without_head = self._has_stopped and self._had_pid and bool(names) and PID not in names
        head_is_done = self._head is not None and self._head.is_done
        return head_is_done or is_without_head or (SUMMARY in names and summary_exists(self.run, self.job))

    def _exit_code(self) -> int:
        """Exit code of a rank whose actors are done: on the head's rank that of the job."""
        return CRASHED if self._head is not None and job_failed(self.run, self.job) else DONE

    def _wait_time_s(self, now: float) -> float:
        waits = [actor.due - now for actor in self.actors if actor.child is None and not actor.is_done]
        waits += [self._drain[1] + self.launch.drain_s - now] if self._drain is not None else []
        return max(0.0, min([self.times.poll_s, *waits]))

    def _children(self) -> list[ActorProcess]:
        return [actor.child for actor in self.actors if actor.child is not None]

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children():
            child.process.send_signal(number)

    def _all_end(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for child in self._children():
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True

    def _print(self, text: str, who: str = "") -> None:
        print(f"rank {self.rank}{f' ({who})' if who else ''}: {text}", file=sys.stderr, flush=True)
