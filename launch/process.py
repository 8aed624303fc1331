"""An actor's child process as its supervisor sees it, signals to it, and a rank's last line for people.

An actor notices the end of its supervisor by the end of its standard input, whatever ended the supervisor (mpirun
kills its ranks a quarter of a second after SIGTERM). It tells of its first progress by a byte on a pipe of its own; the
head tells of every turn of its loop, too.
"""

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from actors.runtime.context import PROGRESS_FD, TURNS_FD, Context
from areal_bus.errors import ArealBusError
from areal_bus.messages import Role
from launch.runs import newest_checkpoint

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
KEEPING = {  # glibc's: an update's activations are not handed back to the system to be asked for again at the next one
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
}
UNBUFFERED = "PYTHONUNBUFFERED"  # two writes a line, the text and its end: lines of several ranks would mix
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(slots=True)
class ActorProcess:
    """A started actor."""

    process: "subprocess.Popen[bytes]"
    stdin: int  # stays open: its end tells the child that we are gone
    progress: int  # where its first progress shows
    turns: int | None = None  # where the head's turns are counted

    def has_turned(self) -> bool:
        """Whether the head's loop has come round since the last call."""
        try:
            return self.turns is not None and os.eventfd_read(self.turns) > 0
        except BlockingIOError:  # not once
            return False

    def has_progressed(self) -> bool:
        """Whether it made any progress in its life; asked once, when it has ended."""
        try:
            return bool(os.read(self.progress, 1))
        except BlockingIOError:  # somebody that it left behind still holds the other end
            return False

    def close(self) -> None:
        os.close(self.stdin)
        os.close(self.progress)
        if self.turns is not None:
            os.close(self.turns)


def start_child(context: Context, gpus: Sequence[int], command: Sequence[str]) -> ActorProcess:
    """In a session of its own: a terminal's Ctrl-C and mpirun's signals reach it only through us.

    SIGUSR1 is blocked in it until it listens (actors/runtime/process.py). Raises ArealBusError when no process can be
    made.
    """
    theirs, stdin = os.pipe()
    progress, tell = os.pipe()
    os.set_blocking(progress, False)
    turns = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if context.role == Role.HEAD else None
    told = {PROGRESS_FD: tell} | ({TURNS_FD: turns} if turns is not None else {})
    numbers = {name: str(descriptor) for name, descriptor in told.items()}
    inner = environment(os.environ, gpus=gpus, cpu=context.device == "cpu") | numbers
    if context.role == Role.LEARNER:
        inner = KEEPING | inner
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        process = subprocess.Popen(command, stdin=theirs, env=inner, pass_fds=[*told.values()], start_new_session=True)
    except OSError as error:
        for ours in [stdin, progress, *([turns] if turns is not None else [])]:
            os.close(ours)
        raise ArealBusError(f"a process for {context.name} must start: {error}") from None
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.close(theirs)
        os.close(tell)
    with contextlib.suppress(BrokenPipeError):  # it ended at once: its exit code says how
        os.write(stdin, context.to_json().encode() + b"\n")
    return ActorProcess(process, stdin, progress, turns)


def environment(outer: Mapping[str, str], *, gpus: Sequence[int], cpu: bool) -> dict[str, str]:
    """An actor's environment: nothing of the starter's, our packages first, one thread a process on CPU."""
    inner = {
        name: value
        for name, value in outer.items()
        if not name.startswith(STARTER_VARIABLES) and name not in RENDEZVOUS_VARIABLES | {UNBUFFERED}
    }
    inner["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [outer.get("PYTHONPATH")])])
    inner.setdefault("TOKENIZERS_PARALLELISM", "false")
    inner.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a peer's end is our news to tell, in a sentence
    inner.setdefault("LOGURU_LEVEL", "INFO")
    if cpu:  # two OpenMP threads on a busy core cost seven times the CPU time
        inner.setdefault("OMP_NUM_THREADS", "1")
        inner.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    inner[VISIBLE] = ",".join(device_of(gpu, outer) for gpu in gpus)
    return inner


def device_of(gpu: int, outer: Mapping[str, str]) -> str:
    """What CUDA calls a GPU of this rank: the numbers of the topology count what the starter lets us see."""
    seen = [name.strip() for name in outer.get(VISIBLE, "").split(",") if name.strip()]
    return seen[gpu] if gpu < len(seen) else str(gpu)


STARTERS = ("mpirun", "mpiexec", "prterun", "prted")


def say(text: str) -> None:
    """To where mpirun itself writes, when it is our parent; else, and where that cannot be, as anything else."""
    parent = os.getppid()
    with contextlib.suppress(OSError):
        if Path(f"/proc/{parent}/comm").read_text().strip() in STARTERS:
            theirs = os.open(f"/proc/{parent}/fd/2", os.O_WRONLY | os.O_APPEND | os.O_NOCTTY)
            with open(theirs, "w", encoding="utf-8") as stream:
                stream.write(text + "\n")
            return
    print(text, file=sys.stderr, flush=True)


def saved(run: Path, n_ranks: int) -> str:
    """What a run that ends at once has on disk, and the command line that goes on with it."""
    start = f"mpirun -np {n_ranks} python" if n_ranks else "python"
    folder = newest_checkpoint(run)
    kept = f"{folder} is safe, what came after it is lost" if folder else "no checkpoint was written yet"
    where = "goes on from there" if folder else "begins again at version 0"
    first = f"to save first, use kill -USR1 $(cat {run}/pid) instead"
    return f"ends at once; {kept}; {start} -m areal_bus.launch --resume {run} {where}; {first}"


HEEDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def hold_back() -> None:
    """SIGUSR1 waits, here and in processes started from now on, until `Signals` takes it: it would kill those."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})


class Signals:
    """SIGTERM, SIGINT, SIGUSR1 and SIGCHLD end a `wait`, which returns the numbers of the first three."""

    def __enter__(self) -> "Signals":
        self._read, self._write = socket.socketpair()
        self._write.setblocking(False)
        self._fd = signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        self._handlers = {number: signal.signal(number, lambda *_: None) for number in (*HEEDED, signal.SIGCHLD)}
        self._mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
        return self

    def wait(self, timeout_s: float) -> list[signal.Signals]:
        ready, _, _ = select.select([self._read], [], [], timeout_s)
        numbers = self._read.recv(512) if ready else b""
        return [signal.Signals(number) for number in numbers if number in HEEDED]

    def __exit__(self, *_: object) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        signal.set_wakeup_fd(self._fd)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()
