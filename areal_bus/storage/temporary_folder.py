"""Temporary folders beside their final place, locked while their writer lives.

The next writer of the same place deletes those of dead writers. Process ids would not tell dead writers from living
ones: in a container another process soon has the same.
"""

import contextlib
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """A new folder ".NAME.TOKEN.tmp" beside `final`. It is deleted afterwards unless the caller has renamed it.

    Raises OSError.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.iterdir():
        if left.name.startswith(f".{final.name}.") and left.name.endswith(".tmp"):
            delete_unlocked(left)
    folder, descriptor = _new(final)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def _new(final: Path) -> tuple[Path, int]:
    while True:
        folder = final.with_name(f".{final.name}.{secrets.token_hex(6)}.tmp")
        folder.mkdir()
        descriptor = locked(folder)
        if descriptor is not None and folder.is_dir():
            return folder, descriptor
        if descriptor is not None:  # another writer took it for a dead one's before it was locked
            os.close(descriptor)


def locked(folder: Path) -> int | None:
    """A descriptor that holds the lock of a folder until it is closed; None when another one holds it.

    A file system without locks has only free ones.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def delete_unlocked(folder: Path) -> None:
    """Delete a temporary folder whose writer is dead, as far as possible."""
    try:
        descriptor = locked(folder)
    except OSError:
        return
    if descriptor is not None:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)
