"""Run folders: runs/NAME is made once and never written over, runs/latest points to the newest; knows no contents."""

import itertools
import os
from pathlib import Path

from areal_bus.errors import ConfigError


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
