"""One rank as a supervisor: starts its actors by exec, waits, and brings all down when one fails or a signal comes.

Knows processes and exit codes; nothing of messages, MPI or models. An actor notices the end of its supervisor by the
end of its standard input, whatever ended the supervisor (mpirun kills its ranks a quarter of a second after SIGTERM).
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.context import Context

ROOT = Path(__file__).resolve().parents[1]  # where areal_bus, actors, launch and tools lie
STARTER_VARIABLES = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "HYDI_", "HYDRA_", "MPI_LOCAL", "MPIEXEC_")
RENDEZVOUS_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
}
ORPHAN_CHECK_S = 1.0
KILL_S = 2.0  # after SIGKILL a process that is still there is given up


@dataclass(slots=True)
class Child:
    """A started actor."""

    context: Context
    process: "subprocess.Popen[bytes]"
    pipe: int  # to its standard input; stays open, its end tells the child that we are gone


@dataclass(slots=True)
class Supervisor:
    """Actors of one rank. `command` starts one; it reads its Context as a line of standard input."""

    rank: int
    grace_s: float
    command: Sequence[str] = (sys.executable, *(["-O"] if not __debug__ else []), "-m", "actors.start")
    at_end: Callable[[], None] = lambda: None  # called once the actors are told to end
    children: list[Child] = field(default_factory=list)

    def start(self, context: Context, gpus: Sequence[int] = ()) -> None:
        """A child in a session of its own: a terminal's Ctrl-C and mpirun's signals reach it only through us."""
        theirs, ours = os.pipe()
        process = subprocess.Popen(
            self.command,
            stdin=theirs,
            env=environment(os.environ, gpus=gpus, cpu=context.device == "cpu"),
            start_new_session=True,
        )
        os.close(theirs)
        self.children.append(Child(context, process, ours))
        with contextlib.suppress(BrokenPipeError):  # it ended at once: `wait` says how
            os.write(ours, context.to_json().encode() + b"\n")

    def wait(self) -> int:
        """Until all actors have ended, one has failed, or SIGTERM or SIGINT came: the rank's exit code."""
        parent = os.getppid()
        try:
            with Signals() as signals:
                while (code := self._code()) is None:
                    number = signals.wait(ORPHAN_CHECK_S)
                    if number is not None or os.getppid() != parent:
                        code = 128 + (number or signal.SIGTERM)
                        break
            if code:
                self.end()
            return code
        finally:
            for child in self.children:
                os.close(child.pipe)

    def _code(self) -> int | None:
        """The exit code that the actors' ends come to; None while they are well."""
        for child in self.children:
            code = child.process.poll()
            if code:
                report(self.rank, child, code)
                return 2 if code == 2 else 1
        return 0 if all(child.process.returncode == 0 for child in self.children) else None

    def end(self) -> None:
        """SIGTERM to every actor, SIGKILL to those that are left after grace_s."""
        self._signal(signal.SIGTERM)
        self.at_end()  # now: mpirun may kill us in a moment
        if not self._all_end(self.grace_s):
            self._signal(signal.SIGKILL)
            self._all_end(KILL_S)

    def _signal(self, number: signal.Signals) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.send_signal(number)

    def _all_end(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        for child in self.children:
            try:
                child.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                return False
        return True


class Signals:
    """SIGTERM, SIGINT and SIGCHLD as events. `wait` ends at each, and returns the number unless it was SIGCHLD."""

    def __enter__(self) -> "Signals":
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in numbers}
        return self

    def wait(self, timeout_s: float) -> int | None:
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        numbers = self._read.recv(512) if ready else b""
        return next((n for n in numbers if n in (signal.SIGTERM, signal.SIGINT)), None)

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()


def report(rank: int, child: Child, code: int) -> None:
    """Who ended and how; an actor that could speak has said more itself."""
    who = f"rank {rank} ({child.context.role}-{child.context.index})"
    if code < 0:
        print(f"{who}: killed by {signal.Signals(-code).name}", file=sys.stderr, flush=True)
    elif code not in (1, 2):
        print(f"{who}: ended with exit code {code}", file=sys.stderr, flush=True)


def environment(outer: Mapping[str, str], *, gpus: Sequence[int], cpu: bool) -> dict[str, str]:
    """An actor's environment: nothing of the starter's, our packages first, one thread a process on CPU."""
    inner = {
        name: value
        for name, value in outer.items()
        if not name.startswith(STARTER_VARIABLES) and name not in RENDEZVOUS_VARIABLES
    }
    inner["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [outer.get("PYTHONPATH")])])
    inner["PYTHONUNBUFFERED"] = "1"
    inner.setdefault("TOKENIZERS_PARALLELISM", "false")
    inner.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer's end is our news to tell, in a sentence
    inner.setdefault("LOGURU_LEVEL", "INFO")
    if cpu:  # two OpenMP threads on a busy core cost seven times the CPU time
        inner.setdefault("OMP_NUM_THREADS", "1")
        inner.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    inner["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpus))
    return inner
