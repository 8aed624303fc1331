"""A worker process in its own session, with pipes; killing it kills all that it started, by group and by mark."""

import contextlib
import os
import selectors
import signal
import subprocess
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actors.processes.ipc import REPLY_BYTES, REQUEST_BYTES, pack, unpack
from actors.runtime.process import signal_name
from areal_bus.process.isolation import CHILD, child_path

REAP_S = 5.0  # longest wait for a killed process; after that it is left to init
EXIT_S = 0.5  # longest time between the closing of a process's pipes and its end
EXECVE_S = 1.0  # longest wait for processes in execve
FLAGS, OF_KERNEL = 5, 0x00200000  # of /proc/PID/stat behind the state: flags, PF_KTHREAD
READ_BYTES = 64 << 10
MARK = "AREAL_BUS_REWARD_WORKER"  # environment variable that all processes started by a worker inherit
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


class WorkerLost(Exception):
    """The worker process ended or wrote an invalid frame; the text has the reason."""

    def __init__(self, text: str, *, was_killed: bool = False) -> None:
        """`was_killed`: by a SIGKILL from outside, for example of the OOM killer."""
        super().__init__(text)
        self.was_killed = was_killed


class WorkerProcess:
    """A worker process in its own session, with its pipes registered in `selector`."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        data: Any,
        module: str = "actors.rewards.worker",
        *,
        exit_s: float = EXIT_S,
        reply_bytes: int = REPLY_BYTES,
        variables: Mapping[str, str] = ONE_THREAD,
    ) -> None:
        """`data`: attached to every selector event of this process. `exit_s`: longest time between the closing of its
        pipes and its end. `reply_bytes`: largest reply. `variables`: added to the actor's environment.
        """
        self._selector = selector
        self._data, self._exit_s, self._reply_bytes = data, exit_s, reply_bytes
        self._mark = new_mark()
        self._process = subprocess.Popen(
            [*CHILD, module, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**environment(), **variables, MARK: self._mark},
            bufsize=0,
            start_new_session=True,  # its own process group, killed as a whole
        )
        if self._process.stdin is None or self._process.stdout is None:
            raise RuntimeError("a process started with pipes must have them")
        self._requests, self._replies = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._writing = False  # registered for EVENT_WRITE
        os.set_blocking(self._requests, False)
        os.set_blocking(self._replies, False)
        selector.register(self._replies, selectors.EVENT_READ, data)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether the process has ended and is reaped."""
        return self._process.poll() is not None

    def send(self, frame: bytes) -> None:
        """Queue a frame and write as much as the pipe takes. On EVENT_WRITE, `flush` writes the rest."""
        self._outgoing += frame
        self.flush()

    def flush(self) -> None:
        with contextlib.suppress(BlockingIOError, BrokenPipeError):  # retried later; `receive` finds an ended process
            del self._outgoing[: os.write(self._requests, self._outgoing)]
        self._register_writing(bool(self._outgoing))

    def receive(self) -> list[dict[str, Any]]:
        """The complete frames received so far. Raises WorkerLost, which drops frames before it."""
        try:
            data = os.read(self._replies, READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise self._how_it_ended()
        self._incoming += data
        records = []
        try:
            while (record := unpack(self._incoming, cap_bytes=self._reply_bytes)) is not None:
                records.append(record)
        except ValueError as error:
            raise WorkerLost(f"it wrote an invalid frame: {error}") from error
        return records

    def kill(self) -> None:
        """Kill the process and all it started, and close the pipes. `ended` becomes true soon after."""
        self._kill_group()
        kill_marked(self._mark)
        self._register_writing(False)
        self._selector.unregister(self._replies)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def reap(self) -> None:
        """Wait up to REAP_S for the end of a killed process."""
        with contextlib.suppress(subprocess.TimeoutExpired):  # stuck in the kernel
            self._process.wait(REAP_S)

    def _register_writing(self, wanted: bool) -> None:
        if wanted and not self._writing:
            self._selector.register(self._requests, selectors.EVENT_WRITE, self._data)
        elif self._writing and not wanted:
            self._selector.unregister(self._requests)
        self._writing = wanted

    def _kill_group(self) -> None:
        if self._process.returncode is None:  # not reaped: its pid cannot be reused yet
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _how_it_ended(self) -> WorkerLost:
        """The reason for closed pipes. Does not reap the process, so that its group can still be killed safely."""
        deadline = time.monotonic() + self._exit_s
        while (end := os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)) is None:
            if time.monotonic() >= deadline:
                return WorkerLost("it closed its pipes")
            time.sleep(0.002)
        if end.si_code == os.CLD_EXITED:
            return WorkerLost(f"it ended by exit code {end.si_status}")
        name = signal_name(end.si_status).removeprefix("signal ")
        return WorkerLost(f"it ended by signal {name}", was_killed=end.si_status == signal.SIGKILL)


class CalledProcess:
    """A worker process whose caller waits for each of its frames. Use it on the thread that created it."""

    def __init__(
        self,
        module: str,
        *,
        exit_s: float = EXIT_S,
        most_bytes: int | None = None,
        variables: Mapping[str, str] = ONE_THREAD,
        alarm: int | None = None,
    ) -> None:
        """`alarm`: an eventfd that ends a wait. `most_bytes`: of a frame, if not REQUEST_BYTES and REPLY_BYTES."""
        self._selector = selectors.DefaultSelector()
        self._request_bytes, self._alarm = most_bytes or REQUEST_BYTES, alarm
        self._frames: deque[dict[str, Any]] = deque()
        if alarm is not None:
            self._selector.register(alarm, selectors.EVENT_READ)
        self._process = WorkerProcess(
            self._selector, None, module, exit_s=exit_s, reply_bytes=most_bytes or REPLY_BYTES, variables=variables
        )

    @property
    def ended(self) -> bool:
        return self._process.ended

    def send(self, record: dict[str, Any]) -> None:
        """Raises ValueError for a frame over the limit."""
        self._process.send(pack(record, cap_bytes=self._request_bytes))

    def receive(self, left_s: Callable[[], float], check: Callable[[], None] = lambda: None) -> dict[str, Any] | None:
        """The next frame; None when no time is left. `check` may raise before each wait. Raises WorkerLost."""
        while not self._frames and (longest_s := left_s()) > 0:
            check()
            for selected, events in self._selector.select(longest_s):
                if selected.fd == self._alarm:
                    os.eventfd_read(selected.fd)
                elif events & selectors.EVENT_WRITE:
                    self._process.flush()
                else:
                    self._frames.extend(self._process.receive())
        return self._frames.popleft() if self._frames else None

    def kill(self) -> None:
        """Kill it with all that it started, and wait for its end."""
        self._process.kill()
        self._process.reap()
        self._selector.close()


def new_mark() -> str:
    """A mark for processes that are killed together. It begins with the pid of their actor, and a dot."""
    actor = os.environ.get(MARK, "").partition(".")[0] or str(os.getpid())
    return f"{actor}.{uuid.uuid4().hex}"


def kill_marked(mark: str) -> None:
    """SIGKILL all processes whose mark begins so, in any session; waits for those within execve. "PID." are all that
    an actor's workers have left.
    """
    wanted = f"{MARK}={mark}".encode()
    killed: set[int] = set()
    deadline = time.monotonic() + EXECVE_S
    while True:
        found, undecided = set[int](), False
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            environment = read_proc(pid, "environ")
            if any(one.startswith(wanted) for one in environment.split(b"\0")):
                found.add(pid)
            undecided = undecided or (not environment and is_in_execve(pid))
        for pid in found - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if found <= killed and not (undecided and time.monotonic() < deadline):
            return
        killed |= found
        if undecided:
            time.sleep(0.001)


def is_in_execve(pid: int) -> bool:
    """Whether a process of this user that had no environment had no arguments either, or has its environment now."""
    state, *numbers = read_proc(pid, "stat").rpartition(b")")[2].split() or [b"Z"]
    if state in (b"Z", b"X") or int(numbers[FLAGS]) & OF_KERNEL:
        return False
    if read_proc(pid, "cmdline") and not read_proc(pid, "environ"):
        return False  # started with an empty one
    with contextlib.suppress(OSError):
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    return False


def read_proc(pid: int, name: str) -> bytes:
    """A file of a process in /proc; empty when it has ended or belongs to another user."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except OSError:
        return b""


def environment() -> dict[str, str]:
    """The actor's environment, with this project importable."""
    return {**os.environ, "PYTHONPATH": child_path(), "PYTHONHASHSEED": "0"}
