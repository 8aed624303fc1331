"""Folders of runs: names, the lock, the pid file, and files that are replaced whole.

The supervisor of rank 0 holds it, and the kernel lets go of it when that process ends, however it ends.

It is the supervisor of rank 0, on its host; the file is gone once the job has ended, unless that was killed.
"""

import fcntl
import itertools
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

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


CONFIG, ORIGIN, SUMMARY = "config.json", "origin.json", "summary.json"
JOURNAL = re.compile(r"[a-z_]+-\d+\.(\d+)\.jsonl")


def make_run_folder(parent: Path, name: str) -> Path:
    """A new folder `parent/name`, or `name-2`, `name-3`, ... when that exists; `parent/latest` points to it."""
    try:
        parent.mkdir(parents=True, exist_ok=True)
        folder = first_free(parent, name)
        point_latest(parent, folder.name)
    except OSError as error:
        raise ConfigError(f"run.folder must be a folder that can be written: {parent}: {error.strerror}") from None
    return folder.resolve()


def first_free(parent: Path, name: str) -> Path:
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # fails when it exists, so two starts never share one
        except FileExistsError:
            continue
        return folder
    raise AssertionError("unreachable")


def point_latest(parent: Path, name: str) -> None:
    """Replace the link in one step: a reader sees the old run or the new one."""
    link = parent / f".latest.{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(parent / "latest")


def named(parent: Path, name: str) -> list[Path]:
    """The runs that `make_run_folder` has made for this name, the one that was started last first."""
    if not parent.is_dir():
        return []
    alike = re.compile(rf"{re.escape(name)}(-\d+)?")
    found = [path for path in parent.iterdir() if alike.fullmatch(path.name) and (path / CONFIG).is_file()]
    return sorted(found, key=started, reverse=True)


def started(run: Path) -> float:
    """When its last life began, by its lock."""
    lock = run / LOCK
    return (lock if lock.is_file() else run / CONFIG).stat().st_mtime


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; {} when there is no such file. Raises ConfigError when it is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"a run's files must be readable: {path}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} must hold one JSON object, not a {type(value).__name__}")
    return value


def no_run(wanted: str, parent: Path) -> str:
    """Why that is not the folder of a run, for people; `parent` is where runs lie."""
    if not Path(wanted).is_dir():
        meant = parent / wanted
        return f"{wanted!r} is no folder" + (f"; did you mean {meant}?" if (meant / CONFIG).is_file() else "")
    return f"{wanted} has no {CONFIG}" + (" and is where runs lie" if (Path(wanted) / "latest").is_symlink() else "")


def is_finished(run: Path) -> bool:
    """It has come to its end, and well; not one that was drained."""
    summary = read_object(run / SUMMARY)
    return summary.get("code") == 0 and not summary.get("drained")


def n_done(run: Path) -> int:
    """Updates of a run that has ended."""
    return int(read_object(run / SUMMARY).get("versions", 0))


def checkpoints(run: Path) -> list[Path]:
    """Folders of RUN/checkpoints whose version has a frontier, newest first; what is in them is not looked at."""
    found = {int(path.name.removeprefix("step-")): path for path in (run / "checkpoints").glob("step-*")}
    return [found[v] for v in sorted(found, reverse=True) if (run / "frontiers" / f"frontier-{v:06d}").exists()]


def newest_checkpoint(run: Path) -> Path | None:
    return next(iter(checkpoints(run)), None)


def largest_incarnation(folders: Iterable[Path]) -> int:
    """That a journal in these folders knows; -1 for none."""
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return max((int(match[1]) for name in names if (match := JOURNAL.fullmatch(name))), default=-1)


def replace_file(path: Path, text: str) -> None:
    """Whole or not at all."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(path)


PID = "pid"


class PidFile:
    """Of this process."""

    def __init__(self, run: Path) -> None:
        self._path = run / PID
        replace_file(self._path, f"{os.getpid()}\n")

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)
