"""One worker process as its pool sees it: two pipes that never block, a group to kill; knows no task or deadline."""

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from actors.rewards.framing import REPLY_BYTES, unpack

REAP_S = 5.0  # a killed process is gone by then, or left to init
EXIT_S = 0.5  # a process that ends closes its pipes this much before it is gone, at most
READ_BYTES = 64 << 10
MARK = "AREAL_BUS_REWARD_WORKER"  # environment: inherited by everything that a worker starts
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class ChildLost(Exception):
    """The process ended, or wrote what is no frame; the text says which."""

    def __init__(self, text: str, *, was_killed: bool = False) -> None:
        """`was_killed`: by a SIGKILL that was not ours: the kernel's, when memory ran out, or somebody's."""
        super().__init__(text)
        self.was_killed = was_killed


class Child:
    """A process of a worker's module in a session of its own; its pipes are registered with `selector`."""

    def __init__(self, selector: selectors.BaseSelector, data: Any, module: str = "actors.rewards.worker") -> None:
        """`data` comes back from the selector with every event of this child."""
        self._selector = selector
        self._data = data
        self._mark = uuid.uuid4().hex
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment() | {MARK: self._mark},
            bufsize=0,
            start_new_session=True,  # a process group of its own, to be killed as one
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process started with pipes must have them")
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._writing = False  # registered for what is unsent
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        selector.register(self._replies, selectors.EVENT_READ, data)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """The process is gone and reaped."""
        return self._process.poll() is not None

    def send(self, frame: bytes) -> None:
        """Queue a frame and write what the pipe takes; `flush` writes the rest when the selector says so."""
        self._outgoing += frame
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # later; or `receive` finds the process ended
            del self._outgoing[: os.write(self._requests, self._outgoing)]
        self._register_writing(bool(self._outgoing))

    def receive(self) -> list[dict[str, Any]]:
        """The frames that are there. Raises ChildLost, with every frame before it dropped."""
        try:
            data = os.read(self._replies, READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise self._how_it_ended()
        self._incoming += data
        records = []
        try:
            while (record := unpack(self._incoming, cap_bytes=REPLY_BYTES)) is not None:
                records.append(record)
        except ValueError as error:
            raise ChildLost(f"it wrote what is no frame: {error}") from error
        return records

    def kill(self) -> None:
        """End it, with whatever it started, and let go of the pipes; `ended` comes soon after."""
        self._kill_group()
        kill_marked(self._mark)
        self._register_writing(False)
        self._selector.unregister(self._replies)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def reap(self) -> None:
        """Wait for the end of a killed process, within reason."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel: not ours to wait for
            self._process.wait(REAP_S)

    def _register_writing(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._selector.register(self._requests, selectors.EVENT_WRITE, self._data)
        elif self._writing and not wanted:
            self._selector.unregister(self._requests)
        self._writing = wanted

    def _kill_group(self) -> None:
        if self._process.returncode is None:  # not reaped: its number cannot belong to another process yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_ended(self) -> ChildLost:
        """Its pipes are closed. It is looked at before it is reaped: until then its group can be killed safely."""
        deadline = time.monotonic() + EXIT_S
        while (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() >= deadline:
                return ChildLost("it closed its pipes")
            time.sleep(0.002)
        if end.si_code == os.CLD_EXITED:
            return ChildLost(f"it ended by exit code {end.si_status}")
        name = signal.Signals(end.si_status).name
        return ChildLost(f"it ended by signal {name}", was_killed=end.si_status == signal.SIGKILL)


def kill_marked(mark: str) -> None:
    """SIGKILL to all with this mark in their environment: what a worker started and put into another session, too."""
    wanted = f"{MARK}={mark}".encode()
    killed: set[int] = set()
    while True:
        found = {pid for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))) if wanted in read_environment(pid)}
        if found <= killed:
            return
        for pid in found - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= found


def read_environment(pid: int) -> list[bytes]:
    """What the process began with; nothing for one that is gone or somebody else's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def environment() -> dict[str, str]:
    """The actor's own, with this project importable and one thread a worker."""
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": path, "PYTHONHASHSEED": "0"}
