"""Runs an untrusted Python program in a process of its own: its output, and how it ended (docs/sandbox.md).

"bubblewrap": namespaces without network or the host's files; "rlimits": limits only, and it can read all files of
this user. No verdict of a program counts.
"""

import contextlib
import functools
import json
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Literal

from actors.processes.worker_process import MARK, REAP_S, kill_marked, new_mark
from actors.rewards import syscall_filter

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
RESIDENT = 1  # field of /proc/PID/statm


def resident_bytes(root: int) -> int:
    """Resident bytes of the process `root` and its descendants; memory that they share counts for each."""
    total = 0
    for pid in descendants(root):
        with contextlib.suppress(OSError, IndexError):  # it has ended
            total += int(Path(f"/proc/{pid}/statm").read_text(encoding="utf-8").split()[RESIDENT]) * PAGE_BYTES
    return total


def descendants(root: int) -> Iterator[int]:
    """`root`, its children, their children, ... Not recursive: a program decides how deep they are."""
    left = [root]
    while left:
        pid = left.pop()
        yield pid
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{pid}/task"):
                left += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text(encoding="utf-8").split())


Level = Literal["bubblewrap", "rlimits"]
NOBODY = 65534
FIRST_UID = 1_900_000_000  # started by root, a program runs as FIRST_UID + thread id: RLIMIT_NPROC counts by user
READ_BYTES = 64 << 10
LOOK_S = 0.1
PROBE = "import json, socket; print(open('/proc/self/stat').read() and 7 * 191)"
WEAKER = (
    "the sandbox of model-written code uses rlimits only, which is weaker: no namespaces, so code can use the network "
    "and read this user's files; install bubblewrap and allow user namespaces"
)
# Inside: limits first, then root's rights go, then the program. `sys.argv` carries the numbers and the uid.
# Without namespaces a parent of its own waits for the program, so that what kills its parent kills that one.
# `-S` leaves out the packages of the interpreter and two thirds of its start; exit and quit come from there, too.
PRELUDE = """\
import _sitebuiltins, builtins, os, resource, sys
builtins.exit, builtins.quit = (_sitebuiltins.Quitter(name, "Ctrl-D") for name in ("exit", "quit"))
cpu, memory, file, processes, uid, started = map(int, sys.argv[1:7])
child = os.fork() if processes < 0 else 0
if child:
    os.close(started)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(code if code >= 0 else 128 - code)
for name, value in (("CPU", cpu), ("AS", memory), ("FSIZE", file), ("NPROC", processes), ("CORE", 0), ("NOFILE", 64)):
    if value >= 0:
        resource.setrlimit(getattr(resource, "RLIMIT_" + name), (value, value))
if uid:
    os.setgroups([]); os.setresgid(65534, 65534, 65534); os.setresuid(uid, uid, uid)
source = open(sys.argv[7], encoding="utf-8").read()
os.write(started, b"1"); os.close(started)
sys.argv = ["main.py"]
del child, cpu, memory, file, processes, uid, started, name, value, _sitebuiltins, builtins, os, resource, sys
exec(compile(source, "main.py", "exec"))
"""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    wall_s: float = 10.0
    cpu_s: int = 10  # of one process
    memory_bytes: int = 1 << 30  # address space of one process
    all_memory_bytes: int = 2 << 30  # resident, of all processes together; looked at every LOOK_S
    file_bytes: int = 1 << 20  # of one file
    disk_bytes: int = 16 << 20  # of /tmp, "bubblewrap" only
    n_processes: int = 64  # "bubblewrap" only: elsewhere the kernel counts all processes of this user
    output_bytes: int = 1 << 20  # of stdout, and of stderr


End = Literal["exit", "timeout", "output", "memory"]  # the last two: it exceeded a limit and was killed


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a program ended. `exit_code` is valid only for "exit"; a signal gives 128 + its number."""

    end: "End"
    exit_code: int
    stdout: bytes  # at most SandboxLimits.output_bytes
    stderr: bytes
    wall_s: float


KILLER = Outcome("timeout", 0, b"", b"", 0.0)
_is_shut = False


@contextlib.contextmanager
def shut() -> Iterator[None]:
    """Run no program meanwhile: each outcome is a timeout. For a completion whose program has ended this process twice,
    which the level "rlimits" cannot prevent: the program fails, the function still gives its verdict.
    """
    global _is_shut
    _is_shut = True
    try:
        yield
    finally:
        _is_shut = False


def run(
    program: str, stdin: bytes = b"", limits: SandboxLimits | None = None, *, level: Level | None = None
) -> Outcome:
    """Run the text as `__main__`. No process of it is left ("rlimits": none that kept its environment). Raises OSError
    when the sandbox cannot start.
    """
    if _is_shut:
        return KILLER
    limits = limits or SandboxLimits()
    with memory_file(stdin) as given, Program(program, limits, level or find_level(), stdin=given) as started:
        outcome = watch(started.process, limits)
    started.check(outcome)
    return outcome


def run_connected(
    program: str, server: str, limits: SandboxLimits | None = None, *, level: Level | None = None
) -> Outcome:
    """Run two sandboxed programs, joined by stdin and stdout. The outcome of `program`, stderr only. Raises OSError."""
    if _is_shut:
        return KILLER
    limits, level = limits or SandboxLimits(), level or find_level()
    with contextlib.ExitStack() as stack:
        calls, call_end = map(stack.enter_context, pipe())
        answers, answer_end = map(stack.enter_context, pipe())
        ends = {"stdin": calls.fileno(), "stdout": answer_end.fileno(), "stderr": subprocess.DEVNULL}
        serving = stack.enter_context(Program(server, limits, level, **ends))
        ends = {"stdin": answers.fileno(), "stdout": call_end.fileno()}
        started = stack.enter_context(Program(program, limits, level, **ends))
        for end in (calls, call_end, answers, answer_end):  # else the end of one program would not be seen by the other
            end.close()
        serving.wait_start()
        outcome = watch(started.process, limits, serving.process)
    started.check(outcome)
    return outcome


def pipe() -> tuple[BinaryIO, BinaryIO]:
    reading, writing = os.pipe()
    return os.fdopen(reading, "rb"), os.fdopen(writing, "wb")


class Program:
    """A program in the sandbox; a context manager that ends it with all that it started."""

    def __init__(
        self,
        program: str,
        limits: SandboxLimits,
        level: Level,
        *,
        stdin: int,
        stdout: int = subprocess.PIPE,
        stderr: int = subprocess.PIPE,
    ) -> None:
        self._program, self._limits, self._level = program, limits, level
        self._stdin, self._stdout, self._stderr = stdin, stdout, stderr
        self._has_started = False

    def __enter__(self) -> "Program":
        limits, level = self._limits, self._level
        with contextlib.ExitStack() as stack:
            self._begun, starting = map(stack.enter_context, pipe())
            self._info, informing = map(stack.enter_context, pipe())
            started, informed = starting.fileno(), informing.fileno()
            source = stack.enter_context(memory_file(self._program.encode(errors="replace")))
            self._mark = new_mark()
            passed = [source, started]
            if level == "bubblewrap":
                passed += [
                    informed,
                    *(stack.enter_context(memory_file(text)) for text in [syscall_filter.program()] if text),
                ]
                walled = inner(limits, "/main.py", started, private=True)
                command, folder = [*walls(limits, source, *passed[2:]), *walled], "/"
            else:
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="areal-bus-code-"))
                command = inner(limits, f"/proc/self/fd/{source}", started, private=False)
            self.process = subprocess.Popen(
                command,
                stdin=self._stdin,
                stdout=self._stdout,
                stderr=self._stderr,
                pass_fds=passed,
                env={MARK: self._mark, "PATH": "/usr/bin:/bin", "PYTHONHASHSEED": "0"},
                cwd=folder,
                start_new_session=True,
            )
            starting.close()
            informing.close()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        with self._stack:
            kill(self.process, self._mark, self._level)
            wait_for_namespace(self._info.read())
            self._has_started = self._has_started or bool(self._begun.read(1))

    def wait_start(self) -> None:
        """Wait until the program begins. Raises OSError if it does not."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._begun, selectors.EVENT_READ)
            selector.select(self._limits.wall_s)
            self._has_started = bool(selector.select(0)) and bool(self._begun.read(1))
        if not self._has_started:
            raise OSError(f"timed out: the sandbox ({self._level}) did not start within {self._limits.wall_s:g} s")

    def check(self, outcome: Outcome) -> None:
        """After the end: raises OSError if the program did not begin."""
        if not self._has_started:
            raise OSError(
                f"the sandbox ({self._level}) must start: {outcome.end}: {outcome.stderr.decode(errors='replace')}"
            )


def inner(limits: SandboxLimits, source: str, started: int, *, private: bool) -> list[str]:
    """The interpreter with the limits; `private`: in namespaces of its own."""
    uid = FIRST_UID + threading.get_native_id() if private and os.getuid() == 0 else 0
    numbers = (
        limits.cpu_s,
        limits.memory_bytes,
        limits.file_bytes,
        limits.n_processes if private else -1,
        uid,
        started,
    )
    return [interpreter(), "-s", "-S", "-P", "-B", "-c", PRELUDE, *map(str, numbers), source]


def walls(limits: SandboxLimits, source: int, informed: int, system_calls: int | None = None) -> list[str]:
    """bubblewrap: a read-only root with the interpreter and the system's libraries, and a small private /tmp."""
    program = shutil.which("bwrap")
    if program is None:
        raise FileNotFoundError("the sandbox needs bubblewrap: there is no bwrap on PATH")
    command = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox", "--cap-drop", "ALL"]
    command += ["--info-fd", str(informed)]
    command += [] if system_calls is None else ["--seccomp", str(system_calls)]
    if os.getuid() == 0:  # no user namespace: a limit of processes does not bind a process that is root outside
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", str(NOBODY), "--gid", str(NOBODY)]
    command += ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "lib", "lib64"):
        if os.path.islink(f"/{name}"):
            command += ["--symlink", f"usr/{name}", f"/{name}"]
        elif os.path.isdir(f"/{name}"):
            command += ["--ro-bind", f"/{name}", f"/{name}"]
    if not sys.base_prefix.startswith("/usr/"):
        for parent in reversed(Path(sys.base_prefix).parents[:-1]):  # else those closed on the host stay closed
            command += ["--perms", "0755", "--dir", str(parent)]
        command += ["--ro-bind", sys.base_prefix, sys.base_prefix]
    command += ["--proc", "/proc", "--dev", "/dev", "--perms", "1777", "--size", str(limits.disk_bytes)]
    command += ["--tmpfs", "/tmp", "--perms", "0444", "--ro-bind-data", str(source), "/main.py"]
    command += ["--remount-ro", "/dev", "--remount-ro", "/"]  # else files there would fill the machine's memory
    return [
        *command,
        "--chdir",
        "/tmp",
        "--setenv",
        "HOME",
        "/tmp",
        "--setenv",
        "LANG",
        "C.UTF-8",
        "--setenv",
        "PYTHONHASHSEED",
        "0",
    ]


def interpreter() -> str:
    """The interpreter behind a virtual environment, whose packages the program does not get."""
    return os.path.realpath(sys.executable)


@contextlib.contextmanager
def memory_file(content: bytes) -> Iterator[int]:
    """A file without a name that can be read from the start."""
    file = os.memfd_create("areal-bus", 0)
    try:
        with os.fdopen(os.dup(file), "wb") as writer:
            writer.write(content)
        os.lseek(file, 0, os.SEEK_SET)
        yield file
    finally:
        os.close(file)


def watch(
    process: subprocess.Popen[bytes], limits: SandboxLimits, other: subprocess.Popen[bytes] | None = None
) -> Outcome:
    """Read the pipes of standard output and error until the process ends, or it or `other` reaches a limit."""
    began = looked = time.monotonic()
    printed = {pipe.fileno(): bytearray() for pipe in (process.stdout, process.stderr) if pipe is not None}
    process_end = os.pidfd_open(process.pid)  # not the end of the pipes: a child may keep them open
    outcome: End = "timeout"
    with os.fdopen(process_end, encoding="utf-8"), selectors.DefaultSelector() as selector:
        for file in (*printed, process_end):
            selector.register(file, selectors.EVENT_READ)
        while (left := began + limits.wall_s - time.monotonic()) > 0:
            ready = {key.fd for key, _ in selector.select(min(left, LOOK_S))}
            for file in ready & set(printed):
                if not read_some(file, printed[file]):
                    selector.unregister(file)
            if any(len(text) > limits.output_bytes for text in printed.values()):
                outcome = "output"
                break
            if ready == {process_end}:  # and nothing is left in the pipes
                outcome = "exit"
                break
            if time.monotonic() >= looked + LOOK_S:
                looked = time.monotonic()
                if any(resident_bytes(one.pid) > limits.all_memory_bytes for one in (process, other) if one):
                    outcome = "memory"
                    break
    out, err = (bytes(printed[pipe.fileno()][: limits.output_bytes]) if pipe is not None else b""
                for pipe in (process.stdout, process.stderr))  # fmt: skip
    return Outcome(outcome, exit_code(process) if outcome == "exit" else 0, out, err, time.monotonic() - began)


def read_some(file: int, text: bytearray) -> bool:
    """Append what a pipe holds; false at its end."""
    data = os.read(file, READ_BYTES)
    text += data
    return bool(data)


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Of a process that has ended; a signal gives 128 + its number, as bubblewrap reports it."""
    code = process.wait()
    return code if code >= 0 else 128 - code


def kill(process: subprocess.Popen[bytes], mark: str, level: Level) -> None:
    """End the process with all that it started, and close its pipes."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    if level == "rlimits":
        kill_marked(mark)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAP_S)
    for pipe in (process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


def wait_for_namespace(info: bytes) -> None:
    """Wait up to REAP_S for process 1 of the program's namespace: the kernel ends all others there before it."""
    if not info:  # "rlimits", or bubblewrap did not get so far
        return
    try:
        first = os.pidfd_open(json.loads(info)["child-pid"])
    except ProcessLookupError:
        return
    with os.fdopen(first, encoding="utf-8"), selectors.DefaultSelector() as selector:
        selector.register(first, selectors.EVENT_READ)
        selector.select(REAP_S)


@functools.cache
def find_level() -> Level:
    """The strongest level that runs a program on this machine. Prints a line, once a process, when it is the weaker."""
    if has_namespaces():
        return "bubblewrap"
    print(WEAKER, file=sys.stderr)
    return "rlimits"


def has_namespaces() -> bool:
    """Whether a program runs with bubblewrap here."""
    try:
        return run(PROBE, level="bubblewrap").stdout == b"1337\n"
    except OSError:  # no bubblewrap, or no namespaces
        return False
