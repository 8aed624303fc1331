"""RUN/lock: a run has one job at a time; knows nothing else of a run.

The supervisor of rank 0 holds it, and the kernel lets go of it when that process ends, however it ends.
"""

import fcntl
import os
import socket
import sys
import time
from pathlib import Path

from areal_bus.errors import ConfigError

LOCK = "lock"
POLL_S = 0.2


class Running(ConfigError):
    """The run has a job that lives."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(f"a run has one job at a time: {run} runs now ({holder})")
        self.holder = holder


class Lock:
    """Held for as long as this process lives, or until it is released."""

    def __init__(self, run: Path, *, wait_s: float = 0.0, name: str = LOCK) -> None:
        """Raises Running when somebody else holds it for more than `wait_s`. `name` is the file's."""
        path = run / name
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while not take(self._file, path, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                holder = read_holder(self._file)
                os.close(self._file)
                raise Running(run, holder)
            time.sleep(POLL_S)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)


def check_free(run: Path) -> None:
    """Raises Running when a job holds the run now; takes and writes nothing."""
    try:
        file = os.open(run / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if not take(file, run / LOCK, fcntl.LOCK_SH):
            raise Running(run, read_holder(file))
    finally:
        os.close(file)


def is_held(run: Path) -> bool | None:
    """Whether a job holds the run now; None where that cannot be known: the file system has no locks."""
    try:
        file = os.open(run / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def take(file: int, path: Path, kind: int) -> bool:
    """False when another process is in the way. A file system without locks lets everybody in, and says so."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"warning: nothing keeps a second job out of this run: {path}: {error.strerror}", file=sys.stderr)
    return True


def read_holder(file: int) -> str:
    return os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"
