"""A child process that is a fork without exec: shares all pages; has the methods of Popen that are used."""

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import NoReturn

from actors.runtime.process import CRASHED, leave
from areal_bus.errors import ArealBusError
from areal_bus.process.parent_death import die_with_parent

NAME_FILE = "/proc/self/comm"  # up to 15 characters, for ps and top
KEEPS_PLACE = 79  # exit code of a supervisor without actors: its rank ends with the other ranks of the host
FIRST_DESCRIPTOR = 3  # after the standard streams
RESET = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD)


def n_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def reset_signals() -> None:
    """In a child: the dispositions of a new Python process; SIGUSR1 and SIGUSR2 are blocked."""
    signal.set_wakeup_fd(-1)
    for number in RESET:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGUSR1, signal.SIGUSR2})


def reseed() -> None:
    """Give a forked child its own random numbers. Python reseeds `random` after a fork; numpy is not reseeded."""
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()


def name_process(name: str) -> None:
    """The name of this process in ps and top: a fork has the command line of its parent."""
    with contextlib.suppress(OSError):
        Path(NAME_FILE).write_text(name, encoding="utf-8")


class ForkedProcess:
    """A child that runs `run` and ends with its result as exit code."""

    def __init__(
        self, run: Callable[[], int], *, name: str, stdin: int, environment: Mapping[str, str], keep: Collection[int]
    ) -> None:
        """`name`: in ps; `keep`: descriptors that stay. Own session. Raises ArealBusError with threads, and OSError."""
        if (n := n_threads()) != 1:
            raise ArealBusError(f"too many threads for a fork: a process must have one, and has {n}")
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        parent = os.getpid()
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # no handler of ours runs in the child
        try:
            self.pid = os.fork()
            if not self.pid:
                _become(run, name, parent, stdin, environment, keep)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, -N after signal N; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float) -> int:
        """Its exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        if (code := self.poll()) is not None:
            return code
        descriptor = os.pidfd_open(self.pid)
        try:
            end = select.poll()
            end.register(descriptor, select.POLLIN)
            end.poll(1000 * timeout)
        finally:
            os.close(descriptor)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("a forked actor", timeout)
        return code

    def send_signal(self, number: int) -> None:
        """Does nothing once it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _become(
    run: Callable[[], int], name: str, parent: int, stdin: int, environment: Mapping[str, str], keep: Collection[int]
) -> NoReturn:
    """In the child: what exec would do, then `run`. Never returns."""
    code = CRASHED
    try:
        gc.freeze()  # no object of the parent is collected here: it might close a descriptor that is in use again
        reset_signals()
        die_with_parent(parent)
        os.setsid()
        name_process(name)
        os.dup2(stdin, 0)
        sys.stdin = open(0, closefd=False, encoding="utf-8")  # noqa: SIM115  for the life of the process
        _close_all_but(keep)
        os.environ.clear()
        os.environ.update(environment)
        reseed()
        code = run()
    except BaseException:  # noqa: BLE001  nothing may return to the parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        leave(code)


def _close_all_but(keep: Collection[int]) -> None:
    """Close all descriptors but these and the standard streams."""
    low = FIRST_DESCRIPTOR
    for number in [*sorted(keep), os.sysconf("SC_OPEN_MAX")]:
        os.closerange(low, number)
        low = number + 1
