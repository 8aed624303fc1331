"""Folders that are whole or not there at all, by version; knows nothing of what is in them.

A folder is written under a temporary name, synced, then renamed, and renamed again before it is removed: what has its
final name, step-000010, is complete. Names that begin with a dot are on their way: ".tmp" is removed by the next
writer, ".old" stands aside while another takes its name and is put back if that did not happen. A shelf has one writer.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from areal_bus.errors import CheckpointError

SCHEMA = 1
MANIFEST = "manifest.json"
BLOCK = 1 << 20
NAME = re.compile(r"step-(\d{6,})")


def place(shelf: Path, version: int) -> Path:
    """Where the folder of a version is, or would be."""
    return shelf / f"step-{version:06d}"


def versions(shelf: Path) -> dict[int, Path]:
    """The folders that have their final name, the newest first."""
    found = {int(match[1]): path for path in shelf.glob("step-*") if (match := NAME.fullmatch(path.name))}
    return dict(sorted(found.items(), reverse=True))


def building(final: Path) -> Path:
    """An empty folder to write in what `seal` will give its name; what dead writers left is put right first."""
    tidy(final.parent)
    fresh = _temporary(final)
    fresh.mkdir(parents=True)
    return fresh


def seal(fresh: Path, final: Path) -> None:
    """Manifest, sync, rename: after it `final` is complete, before it is not there (or is what it was)."""
    paths = sorted(path for path in fresh.rglob("*") if path.is_file())
    files = {str(path.relative_to(fresh)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    (fresh / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1) + "\n")
    folders = [path for path in fresh.rglob("*") if path.is_dir()]
    for path in [*paths, fresh / MANIFEST, *folders, fresh]:
        _sync(path)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(aside)
    fresh.rename(final)
    _sync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file of the manifest is there with its size and hash."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"a checkpoint has a readable {MANIFEST}: {folder}: {error}") from error
    if not wanted:
        raise CheckpointError(f"a checkpoint holds files: the manifest of {folder} names none")
    for name, is_so in wanted.items():
        path = folder / name
        try:
            same = (path.stat().st_size, _sha256(path)) == is_so
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"every file of the manifest can be read: {path} is missing or not: {error}"
            ) from error
        if not same:
            raise CheckpointError(f"every file is what the manifest says: {path} differs in size or SHA-256")


def prune(shelf: Path, keep: int, *, newest: Path, counts: Callable[[int], bool]) -> None:
    """Remove all but the newest `keep`, and but the newest `keep` of those that count.

    `newest` is what was just written, whatever its version: a run that was set back may have higher ones.
    """
    there = versions(shelf)
    ordered = sorted(there, key=lambda version: there[version] != newest)  # stable: it first, then newest first
    kept = {*ordered[:keep], *[version for version in ordered if counts(version)][:keep]}
    for version in ordered:
        if version not in kept:
            discard(there[version])


def discard_above(shelf: Path, version: int) -> list[Path]:
    """Remove what is newer than `version`; what was there is returned."""
    newer = [path for other, path in versions(shelf).items() if other > version]
    for path in newer:
        discard(path)
    return newer


def discard(path: Path) -> None:
    """Remove a folder: it has lost its final name before the first of its files is gone."""
    leaving = _temporary(path)
    path.rename(leaving)
    shutil.rmtree(leaving)


def give_up(final: Path) -> None:
    """Leave no trace of a folder that could not be written, as far as the disk allows."""
    shutil.rmtree(_temporary(final), ignore_errors=True)
    with contextlib.suppress(OSError):  # the next writer tries again
        tidy(final.parent)


def tidy(shelf: Path) -> None:
    """Put right what a writer that died has left."""
    for aside in shelf.glob(".step-*.old"):
        final = shelf / aside.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)
    for left in shelf.glob(".step-*.tmp"):
        if not _is_another(left.name.split(".")[-2]):
            shutil.rmtree(left)


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.tmp")


def _is_another(pid: str) -> bool:
    """Whether this is a process beside this one that lives."""
    if not pid.isdecimal() or int(pid) == os.getpid():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as somebody else's
        return True
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
