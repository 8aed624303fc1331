"""Starts an actor as a child process, receives signals, and prints a rank's final message.

Its standard input ends with the supervisor, and it with that; its first progress is a byte on a pipe.
"""

import contextlib
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.processes.worker_process import kill_marked
from actors.runtime import start
from actors.runtime.context import COPY_FD, PROGRESS_FD, TURNS_FD, Context
from areal_bus.errors import ArealBusError
from areal_bus.messages import Role
from areal_bus.process import parent_death
from areal_bus.process.commands import resume_command
from areal_bus.process.terminal import COLUMNS, STYLED
from launch.plan.environment import actor_environment, malloc_variables
from launch.run.forked import ForkedProcess
from launch.run.runs import newest_checkpoint


@dataclass(slots=True)
class ActorProcess:
    """A started actor."""

    process: "subprocess.Popen[bytes] | ForkedProcess"
    stdin: int  # stays open: its end of file ends the child
    progress: int  # read end of the pipe for the first progress
    ticks: int | None = None  # eventfd that counts the head's loop iterations

    def loop_has_ticked(self) -> bool:
        """Whether the head's loop has run since the last call."""
        try:
            return self.ticks is not None and os.eventfd_read(self.ticks) > 0
        except BlockingIOError:  # the count is 0
            return False

    def has_progressed(self) -> bool:
        """Whether this incarnation made any progress. Call it once, after the process has ended."""
        try:
            return bool(os.read(self.progress, 1))
        except BlockingIOError:  # a process that it left behind still holds the write end
            return False

    def close(self) -> None:
        """After its end: also of what a killed actor's workers left, such as servers of agents."""
        kill_marked(f"{self.process.pid}.")
        os.close(self.stdin)
        os.close(self.progress)
        if self.ticks is not None:
            os.close(self.ticks)


def start_actor(
    context: Context, gpus: Sequence[int], command: Sequence[str] | None, *, memory: int | None = None
) -> ActorProcess:
    """Start an actor in its own session: signals of the terminal and of mpirun reach it only through the supervisor.

    `command`: None forks this process. `memory`: a file that outlives it, for copies of its state.
    SIGUSR1 and SIGUSR2 are blocked in the actor until it listens (actors/runtime/process.py). Raises ArealBusError when
    the process cannot be started.
    """
    child_stdin, stdin = os.pipe()
    progress, child_progress = os.pipe()
    os.set_blocking(progress, False)
    ticks = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if context.role == Role.HEAD else None
    ours_to_give = {PROGRESS_FD: child_progress, TURNS_FD: ticks, COPY_FD: memory}
    inherited = {name: descriptor for name, descriptor in ours_to_give.items() if descriptor is not None}
    numbers = {name: str(descriptor) for name, descriptor in inherited.items()}
    inner = actor_environment(os.environ, gpus=gpus, cpu=context.device == "cpu") | numbers
    if context.role == Role.LEARNER:
        inner = malloc_variables(context.n_learners) | inner

    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    keep = inherited.values()
    try:
        process: subprocess.Popen[bytes] | ForkedProcess
        if command is None:
            name = f"{context.role}-{context.index}"
            process = ForkedProcess(start.main, name=name, stdin=child_stdin, environment=inner, keep=keep)
        else:
            process = subprocess.Popen(command, stdin=child_stdin, env=inner, pass_fds=keep, start_new_session=True)
    except (OSError, ArealBusError) as error:
        for ours in [stdin, progress, *([ticks] if ticks is not None else [])]:
            os.close(ours)
        raise ArealBusError(f"the process of {context.name} must start: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(child_stdin)
        os.close(child_progress)
    with contextlib.suppress(BrokenPipeError):  # it ended already: its exit code shows the reason
        os.write(stdin, context.to_json().encode() + b"\n")
    return ActorProcess(process, stdin, progress, ticks)


MPI_LAUNCHERS = ("mpirun", "mpiexec", "prterun", "prted")


def is_mpirun(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").strip() in MPI_LAUNCHERS


def is_under_mpirun() -> bool:
    """Whether mpirun has started this rank."""
    with contextlib.suppress(OSError):
        return is_mpirun(parent_death.pid())
    return False


def note_terminal() -> None:
    """Under mpirun, record whether mpirun's own standard output is a terminal, and its width."""
    parent = parent_death.pid()
    with contextlib.suppress(OSError):
        if is_mpirun(parent):
            target = os.readlink(f"/proc/{parent}/fd/1")
            is_terminal = target.startswith(("/dev/pts/", "/dev/tty"))
            os.environ.setdefault(STYLED, str(int(is_terminal)))
            os.environ.setdefault(COLUMNS, str(terminal_columns(target) if is_terminal else 0))


def terminal_columns(path: str) -> int:
    """The width of the terminal at this path; 0 where it is not to be had."""
    with contextlib.suppress(OSError):
        terminal = os.open(path, os.O_RDONLY | os.O_NOCTTY)
        try:
            return os.get_terminal_size(terminal).columns
        finally:
            os.close(terminal)
    return 0


def print_to_mpirun(text: str) -> None:
    """Print to mpirun's own stderr when it has started this rank, else to ours: it drops rank output once it ends."""
    parent = parent_death.pid()
    with contextlib.suppress(OSError):
        if is_mpirun(parent):
            stderr = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with open(stderr, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            return
    print(text, file=sys.stderr, flush=True)


def resume_hint(run: Path, n_ranks: int) -> str:
    """The message of a run that ends at once: its newest checkpoint, and the command that resumes it."""
    folder = newest_checkpoint(run)
    kept = f"the newest checkpoint is {folder}, later updates are lost" if folder else "there is no checkpoint yet"
    where = "continues from it" if folder else "starts again at version 0"
    first = f"to write a checkpoint first, use kill -USR1 $(cat {shlex.quote(str(run / 'pid'))}) instead"
    return f"ends at once; {kept}; {resume_command(run, n_ranks)} {where}; {first}"


HANDLED_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def block_drain_signal() -> None:
    """Block SIGUSR1 (it kills) here and in children until `Signals` receives it; SIGUSR2 stays blocked."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})


class Signals:
    """SIGTERM, SIGINT, SIGUSR1 and SIGCHLD wake up `wait`, which returns the numbers of the first three."""

    def __enter__(self) -> "Signals":
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        numbers = (*HANDLED_SIGNALS, signal.SIGCHLD)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        numbers = self._read.recv(512) if ready else b""
        return [signal.Signals(number) for number in numbers if number in HANDLED_SIGNALS]

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()
