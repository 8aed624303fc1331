"""Run folders: names, the lock (freed with rank 0's supervisor), the pid file and atomic file replacement."""

import contextlib
import fcntl
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path

from actors.runtime.user_code import describe, trace_of
from areal_bus.config.sections import Config
from areal_bus.config.validation import reserved_name
from areal_bus.errors import ConfigError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.atomic_file import read_object, write_atomic
from areal_bus.storage.head_checkpoints import path_of
from areal_bus.storage.journal_segments import NAME as JOURNAL_FILE

LOCK = "lock"
POLL_S = 0.2


class RunInUse(ConfigError):
    """A job uses the run now."""

    def __init__(self, run: Path, holder: str) -> None:
        super().__init__(f"a run can have one job at a time: {run} runs now ({holder})")
        self.holder = holder


class Lock:
    """A file lock, held until this process ends or releases it."""

    def __init__(self, run: Path, *, wait_s: float = 0.0, name: str = LOCK) -> None:
        """Raises RunInUse when another process holds it for more than `wait_s`. `name`: of the lock file."""
        path = run / name
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + wait_s
        while not try_lock(self._file, path, fcntl.LOCK_EX):
            if time.monotonic() >= deadline:
                holder = read_holder(self._file)
                os.close(self._file)
                raise RunInUse(run, holder)
            time.sleep(POLL_S)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def release(self) -> None:
        os.close(self._file)


def check_free(run: Path) -> None:
    """Raises RunInUse when a job holds the run now. Takes no lock and writes nothing."""
    try:
        file = os.open(run / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        if not try_lock(file, run / LOCK, fcntl.LOCK_SH):
            raise RunInUse(run, read_holder(file))
    finally:
        os.close(file)


def is_locked(run: Path) -> bool | None:
    """Whether a job holds the run now; None when the file system has no locks."""
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


def try_lock(file: int, path: Path, kind: int) -> bool:
    """False when another process holds the lock. True, with a warning, on a file system without locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        print(f"warning: no lock protects this run from a second job: {path}: {error.strerror}", file=sys.stderr)
    return True


def read_holder(file: int) -> str:
    return os.pread(file, 200, 0).decode(errors="replace").strip() or "another process"


CONFIG, ORIGIN, SUMMARY = "config.json", "origin.json", "summary.json"
LATEST = "latest"  # beside the runs: a link to the one that was started last


def run_name(config: Config, file: Path) -> str:
    """run.name, or that of the config file. Raises ConfigError for the name of a file that run.name may not have."""
    name = config.run.name or file.stem
    if why := reserved_name(name):
        raise ConfigError(why)
    return name


def make_run_folder(parent: Path, name: str) -> Path:
    """A new folder `parent/name`, or `name-2`, `name-3`, ... when that exists; `parent/latest` points to it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = create_numbered_folder(parent, name)
        point_latest(parent, folder.name)
    except OSError as error:
        raise ConfigError(f"run.folder must be a writable folder: {parent}: {error.strerror}") from None
    return folder.resolve()


def create_numbered_folder(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # fails when the folder exists: two starts never share one
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def point_latest(parent: Path, name: str) -> None:
    """Replace the link atomically; where a folder has its place (a copy of a run), it stays, with a warning."""
    link = parent / f".{LATEST}.{name}"  # one start at a time has this run
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(name)
        link.replace(parent / LATEST)
    except OSError as error:
        print(f"warning: {parent / LATEST} cannot point to this run: {error.strerror}; remove it", file=sys.stderr)
        with contextlib.suppress(OSError):
            link.unlink(missing_ok=True)


def runs_named(parent: Path, name: str) -> list[Path]:
    """The runs that `make_run_folder` has created for this name, the last started first."""
    if not parent.is_dir():
        return []
    alike = re.compile(rf"{re.escape(name)}(-\d+)?")
    found = [path for path in parent.iterdir() if alike.fullmatch(path.name) and (path / CONFIG).is_file()]
    return sorted(found, key=lambda run: (n_started(run), start_time(run)), reverse=True)


def n_started(run: Path) -> int:
    """The number of its last start among all starts of its name: a clock may be set back. 0: an older version's run."""
    try:
        number = read_object(run / ORIGIN).get("start", 0)
    except ConfigError:
        return 0
    return number if type(number) is int else 0


def start_time(run: Path) -> float:
    """Time of its last start, by the lock file."""
    lock = run / LOCK
    return (lock if lock.is_file() else run / CONFIG).stat().st_mtime


def why_no_run(wanted: str, parent: Path) -> str:
    """Why `wanted` is not the folder of a run. `parent`: the folder of all runs."""
    if not Path(wanted).is_dir():
        meant = parent / wanted
        return f"{wanted!r} is not a folder" + (f"; did you mean {meant}?" if (meant / CONFIG).is_file() else "")
    is_parent = (Path(wanted) / LATEST).is_symlink()
    return f"{wanted} has no {CONFIG}" + (" and is the folder of all runs" if is_parent else "")


def is_finished(run: Path) -> bool:
    """Whether the run has ended with code 0, without being drained."""
    summary = read_object(run / SUMMARY)
    return summary.get("code") == 0 and not summary.get("drained")


def n_updates(run: Path) -> int:
    return int(read_object(run / SUMMARY).get("versions", 0))


def checkpoints(run: Path) -> list[Path]:
    """Folders of RUN/checkpoints whose version has a head checkpoint, newest first. Their content is not checked."""
    found = versioned_dirs.versions(run / "checkpoints")
    return [path for version, path in found.items() if path_of(run / "frontiers", version).exists()]


def newest_checkpoint(run: Path) -> Path | None:
    return next(iter(checkpoints(run)), None)


def largest_incarnation(folders: Iterable[Path]) -> int:
    """Largest incarnation in the names of the journals in these folders; -1 without journals."""
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return max((int(match["inc"]) for name in names if (match := JOURNAL_FILE.fullmatch(name))), default=-1)


def why_refused(error: OSError) -> str:
    """What the system has refused at the start of a run, in one sentence."""
    what = error.strerror or str(error) or type(error).__name__
    where = f": {error.filename}" if error.filename is not None else ""
    rule = "its folder and the temporary folder (TMPDIR) must be writable by this user and have free space"
    return f"{what}{where}: the run cannot start; {rule}"


TRACE = "start.error.txt"  # in run.folder: the traceback of the last start that ended with an unexpected error


def why_failed(error: Exception, folder: Path) -> str:
    """An unexpected error of the start, in one sentence. `folder`: run.folder, which gets its traceback."""
    path = folder / TRACE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(trace_of(error), encoding="utf-8")
        where = str(path)
    except OSError as unwritable:
        where = f"not written ({unwritable.strerror})"
    text = " ".join(describe(error).splitlines())
    return f"unexpected error while the run was prepared: {text}; full traceback: {where}"


PID = "pid"


class PidFile:
    """RUN/pid, with the pid of this process."""

    def __init__(self, run: Path) -> None:
        self._path = run / PID
        self._path.unlink(missing_ok=True)  # of an earlier start that could not remove it; a full disk permits it
        write_atomic(self._path, f"{os.getpid()}\n")

    def remove(self) -> None:
        with contextlib.suppress(OSError):  # the disk was mounted anew, read-only
            self._path.unlink(missing_ok=True)
