"""One rank as a supervisor: starts its actors, brings back those that die, and ends all when the job is over or fails.

Knows processes, exit codes (actors/runtime/process.py) and signals; nothing of messages, MPI or models. An actor that
crashed comes back with the next incarnation until it has crashed `launch.max_restarts` times in a row without progress;
mpirun notices nothing. RUN/summary.json says that the job is over: nobody is brought back then.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from actors.runtime.context import Context
from actors.runtime.last_fault import Fault, read_fault
from actors.runtime.process import BAD_INPUT, CRASHED, DONE, LEFT, OVER, RESTART
from areal_bus import parent_death
from areal_bus.config.sections import LaunchConfig, WatchdogConfig
from areal_bus.errors import ArealBusError
from areal_bus.messages import Role
from launch.process import ActorProcess, Signals, print_to_mpirun, resume_hint, start_actor
from launch.restart_policy import Restarts, StallTimer
from launch.runs import SUMMARY

LOOK_S = 1.0  # between looks at the run's folder and at our parent
KILL_S = 2.0  # after SIGKILL a process that is still there is given up
OVER_S = 10.0  # after the job's end an actor that is still there is told to end: it may wait for a head that is gone
LAST_WORD_S = 3.0  # that a head gets to end the job, and say so, when an actor beside it ends for good
SEEN_S = 2.0  # the head writes RUN/summary.json before it tells actors to stop; a network file system shows it later
REPEAT_S = 1.0  # one request may come twice, by the starter and by mpirun: a second one comes later than this


@dataclass(slots=True)
class SupervisedActor:
    """One seat of this rank, over all incarnations that it has had here."""

    context: Context  # of the present or next incarnation
    gpus: Sequence[int]
    restarts: Restarts
    stillness: StallTimer  # of the present incarnation; a head's alone is looked at
    child: ActorProcess | None = None  # None: it waits to be started again, or is done
    due: float = 0.0  # when it is started again
    stopped: bool | None = None  # it ended with 0 and waits for RUN/summary.json; the value: whether it progressed
    is_done: bool = False
    fault: Fault | None = None  # where the life before ended in the user's code, if it did

    @property
    def is_head(self) -> bool:
        return self.context.role == Role.HEAD


@dataclass(slots=True)
class Supervisor:
    """Actors of one rank. `command` starts one; it reads its Context as a line of standard input."""

    rank: int
    launch: LaunchConfig
    watchdog: WatchdogConfig = field(default_factory=WatchdogConfig)
    run: Path = Path("/nowhere")  # the run's folder
    n_ranks: int = 0  # that mpirun was started with; 0: there is none
    command: Sequence[str] = (sys.executable, *(["-O"] if not __debug__ else []), "-m", "actors.runtime.start")
    at_end: Callable[[], None] = lambda: None  # called once the actors are told to end
    waits_for_job: bool = False  # without actors, too, until the job is over: a rank that waits in MPI_Finalize spins
    is_guest: bool = False  # its actor joined a running job: the first signal asks it to leave
    actors: list[SupervisedActor] = field(default_factory=list)
    _drain: tuple[signal.Signals, float] | None = None  # the first request to drain, and when it came
    _over_since: float | None = None

    def start(self, context: Context, gpus: Sequence[int] = ()) -> None:
        """Raises ArealBusError when no process can be made."""
        actor = SupervisedActor(context, gpus, Restarts(self.launch.max_restarts), StallTimer(self.watchdog))
        self.actors.append(actor)
        actor.child = start_actor(context, gpus, self.command)

    def wait(self) -> int:
        """Until all actors are done, one has failed for good, or a signal says so: the rank's exit code."""
        parent = parent_death.pid()
        try:
            with parent_death.end_is_noticed():
                with Signals() as signals:
                    while (code := self._turn(time.monotonic())) is None:
                        numbers = signals.wait(self._patience_s(time.monotonic()))
                        now, is_orphan = time.monotonic(), os.getppid() != parent
                        if (code := self._heed(numbers, now, is_orphan=is_orphan)) is not None:
                            break
                self.end()
            return code
        finally:
            for child in self._children():
                child.close()

    def end(self) -> None:
        """SIGTERM to every actor, SIGKILL to those that are left after launch.grace_s."""
        self._signal(signal.SIGTERM)
        self.at_end()  # now: mpirun may kill us in a moment
        if not self._all_end(self.launch.grace_s):
            self._signal(signal.SIGKILL)
            self._all_end(KILL_S)

    def _turn(self, now: float) -> int | None:
        """Look at everything once. The rank's exit code when there is nothing more to wait for."""
        for actor in self.actors:
            if (code := self._look(actor, now)) is not None:
                return code
        over = self._is_over(now)
        if all(actor.is_done for actor in self.actors) and (over or self._head is not None or not self.waits_for_job):
            return self._verdict()
        if over and now - (self._over_since or now) > OVER_S:
            return self._verdict()
        if self._drain is not None and now - self._drain[1] > self.launch.drain_s:
            self._say(f"not drained within launch.drain_s = {self.launch.drain_s:g}: ends at once")
            return 128 + self._drain[0]
        return None

    def _look(self, actor: SupervisedActor, now: float) -> int | None:
        """At one actor: start it again, or judge its end."""
        if actor.is_done:
            return None
        if actor.child is None:
            if self._is_over(now):
                actor.is_done = True
            elif now >= actor.due:
                return self._start_again(actor, now) if actor.stopped is None else self._disbelieve(actor)
            return None
        code = actor.child.process.poll()
        if code is None:
            return self._look_at_turns(actor.child, actor.stillness, now) if actor.is_head else None
        progressed = actor.child.has_progressed()
        actor.child.close()
        actor.child = None
        if code in (BAD_INPUT, OVER):
            self._leave_last_word(actor)
            return code if code == BAD_INPUT else CRASHED
        if code == LEFT or self._is_over(now) or (code == DONE and actor.is_head):
            actor.is_done = True
            return None
        if code == DONE:
            actor.stopped, actor.due = progressed, now + SEEN_S
            return None
        return self._bring_back(actor, ending(code), crashed=code != RESTART, progressed=progressed)

    def _look_at_turns(self, head: ActorProcess, stillness: StallTimer, now: float) -> int | None:
        """Who names a head that stands still, if not we: its own watchdog stands still with it."""
        found = stillness.look(now, moved=head.loop_has_ticked())
        if found.acts and self.watchdog.action == "abort":
            self._say(f'head-0 stands still since {found.still_s:.0f} s: watchdog.action = "abort" ends the job')
            return CRASHED
        if found.tells:
            self._say(f"warning: head-0 stands still since {found.still_s:.0f} s, and all others wait for it")
        if found.is_over:
            self._say(f"head-0 goes on, after {found.still_s:.0f} s")
        return None

    def _bring_back(self, actor: SupervisedActor, how: str, *, crashed: bool, progressed: bool) -> int | None:
        """Plan the next incarnation, or give the job up."""
        who, most = f"{actor.context.role}-{actor.context.index}", self.launch.max_restarts
        fault, before = read_fault(actor.context.folder / "logs", actor.context.name), actor.fault
        if crashed and fault is not None and fault.recurs(before):
            self._say(
                f"{how}{last_error(actor.context)}; {fault.place} failed before, and nothing was trained since: "
                "the job ends",
                who,
            )
            return CRASHED
        actor.fault = fault
        pause_s = actor.restarts.after(crashed=crashed, progressed=progressed)
        if pause_s is None:
            often = f"that is {most + 1} in a row without progress in between, and " if most else ""
            self._say(f"{how}{last_error(actor.context)}; {often}launch.max_restarts is {most}", who)
            return CRASHED
        actor.context = replace(actor.context, incarnation=actor.context.incarnation + 1)
        actor.due = time.monotonic() + pause_s
        again = f"starts again in {pause_s:g} s as" if pause_s else "started again as"
        self._say(f"{how}; {again} {actor.context.name}", who)
        return None

    def _disbelieve(self, actor: SupervisedActor) -> int | None:
        """It ended as if the job was over, and the job is not: the ring needs it."""
        progressed, actor.stopped = bool(actor.stopped), None
        how = "ended with exit code 0 before the job was over"
        return self._bring_back(actor, how, crashed=True, progressed=progressed)

    def _start_again(self, actor: SupervisedActor, now: float) -> int | None:
        try:
            actor.child = start_actor(actor.context, actor.gpus, self.command)
            actor.stillness = StallTimer(self.watchdog)
        except ArealBusError as error:
            return self._bring_back(actor, str(error), crashed=True, progressed=False)
        if actor.is_head and self._drain is not None:  # what the one before it was told
            actor.child.process.send_signal(signal.SIGUSR1)
        return None

    def _heed(self, numbers: Sequence[signal.Signals], now: float, *, is_orphan: bool) -> int | None:
        """What the signals mean: the first may ask to drain, the next one ends the rank. Exit code when it ends."""
        if is_orphan:
            return 128 + signal.SIGTERM
        for number in numbers:
            if self._drain is None and (number == signal.SIGUSR1 or self._is_notice(number)):
                self._begin_drain(number, now)
            elif self._drain is None or number != self._drain[0] or now - self._drain[1] > REPEAT_S:
                self._say_what_is_safe(number)
                return 128 + number
        return None

    def _is_notice(self, number: signal.Signals) -> bool:
        """Without mpirun SIGTERM is a notice; mpirun kills its ranks a quarter of a second after it."""
        return self.is_guest or (number == signal.SIGTERM and self.launch.bootstrap == "env")

    def _begin_drain(self, number: signal.Signals, now: float) -> None:
        self._drain = number, now
        if self.is_guest:
            self._say(f"{number.name}: leaves when it holds no work; a second signal ends at once")
            for child in self._children():
                child.process.send_signal(signal.SIGUSR1)
        head = self._head
        if head is None:
            return  # the head's rank passes it on
        within = f"launch.drain_s = {self.launch.drain_s:g} s"
        self._say(f"{number.name}: drains, that is checkpoint and end, within {within}; a second signal ends at once")
        if head.child is not None:
            head.child.process.send_signal(signal.SIGUSR1)

    def _say_what_is_safe(self, number: signal.Signals) -> None:
        if self._head is not None:
            print_to_mpirun(f"rank {self.rank}: {number.name}: {resume_hint(self.run, self.n_ranks)}")

    def _leave_last_word(self, ended: SupervisedActor) -> None:
        """Give the head beside it, which knows already, a moment to end the job in order."""
        head = self._head
        if head is not None and head is not ended and head.child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.child.process.wait(LAST_WORD_S)

    @property
    def _head(self) -> SupervisedActor | None:
        return next((actor for actor in self.actors if actor.is_head), None)

    def _is_over(self, now: float) -> bool:
        if self._over_since is None and has_ended(self.run):
            self._over_since = now
        return self._over_since is not None

    def _verdict(self) -> int:
        """Exit code of a rank whose actors are done: the head's rank speaks for the job."""
        return CRASHED if self._head is not None and ended_badly(self.run) else DONE

    def _patience_s(self, now: float) -> float:
        waits = [actor.due - now for actor in self.actors if actor.child is None and not actor.is_done]
        waits += [self._drain[1] + self.launch.drain_s - now] if self._drain is not None else []
        return max(0.0, min([LOOK_S, *waits]))

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

    def _say(self, text: str, who: str = "") -> None:
        print(f"rank {self.rank}{f' ({who})' if who else ''}: {text}", file=sys.stderr, flush=True)


def ending(code: int) -> str:
    """How a process ended, for people; an actor that could speak has said more itself."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return "asks to come back" if code == RESTART else f"ended with exit code {code}"


def last_error(context: Context) -> str:
    """The last line that this incarnation's traceback ends with, if it left one."""
    try:
        lines = (context.folder / "logs" / f"{context.name}.error.txt").read_text().split("\n")
    except OSError:
        return ""
    return "".join(f" ({line.strip()})" for line in [line for line in lines if line.strip()][-1:])


def has_ended(run: Path) -> bool:
    """Whether the head has written how the job ended."""
    try:  # listed, not asked for: a network file system remembers for a while that a file was not there
        return SUMMARY in os.listdir(run)
    except OSError:
        return False


def ended_badly(run: Path) -> bool:
    try:
        return bool(json.loads((run / SUMMARY).read_text())["code"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError):
        return True
