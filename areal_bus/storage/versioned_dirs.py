"""Atomic folders: temporary ones beside their final place, and those by version with a manifest of their files.

A folder is written under a temporary name, synced and renamed. It is renamed again before it is deleted. So a folder
with a final name, step-000010, is complete. The next writer deletes ".tmp" folders of dead writers: a living one locks
its folder. (Process ids would not tell them apart: in a container another process soon has the same.) An ".old" folder
was replaced by a new one of the same name; it is restored if the replacement did not complete. Each parent folder has
one writer.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from areal_bus.errors import CheckpointError
from areal_bus.storage.atomic_file import sync

SCHEMA = 1
MANIFEST = "manifest.json"
NAME = re.compile(r"step-([0-9]{6}|[1-9][0-9]{6,})")  # any other name is a copy, or a stranger's


def place(parent: Path, version: int) -> Path:
    """Path of the folder of a version."""
    return parent / f"step-{version:06d}"


def versions(parent: Path) -> dict[int, Path]:
    """Complete folders by version, newest first."""
    found = {version_of(path): path for path in parent.glob("step-*") if NAME.fullmatch(path.name) and path.is_dir()}
    return dict(sorted(found.items(), reverse=True))


def version_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def building(final: Path) -> Path:
    """A new temporary folder, for `seal`. Cleans up after dead writers first."""
    tidy(final.parent)
    temporary = temporary_of(final)
    temporary.mkdir(parents=True)
    _hold(temporary)
    return temporary


def seal(temporary: Path, final: Path, known: Mapping[str, tuple[int, str]] | None = None) -> None:
    """Write the manifest, sync and rename. Until the rename `final` is absent or has its old content.

    `known`: path in the folder -> (bytes, SHA-256) of files that were hashed while they were written, here or by
    another process. Raises CheckpointError when one of them has another size now, OSError when it is not there.
    """
    known = known or {}
    there = {str(path.relative_to(temporary)) for path in temporary.rglob("*") if path.is_file()}
    paths = {name: temporary / name for name in sorted(there | known.keys())}
    for name, (n_bytes, _) in known.items():
        if paths[name].stat().st_size != n_bytes:
            raise CheckpointError(f"size mismatch in a checkpoint: {paths[name]} was changed after it was written")
    files = {}
    for name, path in paths.items():
        n_bytes, digest = known[name] if name in known else (path.stat().st_size, sha256(path))
        files[name] = {"bytes": n_bytes, "sha256": digest}
    (temporary / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1) + "\n", encoding="utf-8")
    folders = [path for path in temporary.rglob("*") if path.is_dir()]
    for path in [*paths.values(), temporary / MANIFEST, *folders, temporary]:
        sync(path)
    old = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(old)
    temporary.rename(final)
    _release(temporary)
    sync(final.parent)
    if old.exists():
        shutil.rmtree(old)


def link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, atomically."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    try:
        fresh.symlink_to(os.path.relpath(target, path.parent))
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def verify(folder: Path) -> None:
    """Raises CheckpointError unless all files of the manifest exist with their size and hash."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        wanted = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"unreadable {MANIFEST} of a checkpoint: {folder}: {error}") from error
    if not wanted:
        raise CheckpointError(f"a checkpoint contains files: the manifest of {folder} names none")
    for name, expected in wanted.items():
        path = folder / name
        try:
            matches = (path.stat().st_size, sha256(path)) == expected
        except (OSError, ValueError) as error:
            raise CheckpointError(f"every file of the manifest must be readable: {path}: {error}") from error
        if not matches:
            raise CheckpointError(f"every file must match the manifest: {path} differs in size or SHA-256")


def prune(
    parent: Path,
    keep: int,
    *,
    newest: Path,
    counts: Callable[[int], bool],
    is_best: Callable[[int], bool] = lambda version: False,
) -> None:
    """Delete folders, except the newest `keep`, the newest `keep` for which `counts` holds, and the best.

    `newest` is the folder that was just written. It counts as newest even if a rolled-back run has higher versions.
    """
    there = versions(parent)
    ordered = sorted(there, key=lambda version: there[version] != newest)  # stable: `newest` first, then by version
    kept = {*ordered[:keep], *[version for version in ordered if counts(version)][:keep]}
    for version in ordered:
        if version not in kept and not is_best(version):
            discard(there[version])


def discard_above(parent: Path, version: int) -> list[Path]:
    """Delete folders newer than `version` and return their paths."""
    newer = [path for other, path in versions(parent).items() if other > version]
    for path in newer:
        discard(path)
    return newer


def discard(path: Path) -> None:
    """Delete a folder. It is renamed before its files are deleted."""
    leaving = temporary_of(path)
    path.rename(leaving)
    shutil.rmtree(leaving)


def give_up(final: Path) -> None:
    """Delete the temporary folder of a failed write, as far as possible."""
    _release(temporary_of(final))
    shutil.rmtree(temporary_of(final), ignore_errors=True)
    with contextlib.suppress(OSError):  # the next writer tries again
        tidy(final.parent)


def tidy(parent: Path) -> None:
    """Clean up after a dead writer: restore replaced folders, delete temporary ones (open ones may stay on NFS)."""
    for old in parent.glob(".step-*.old"):
        final = parent / old.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)
    for temporary in parent.glob(".step-*.tmp"):
        _release(temporary)  # of an earlier write of this process
        delete_unlocked(temporary)


def temporary_of(final: Path, pid: int | None = None) -> Path:
    """Name of the folder while the process `pid` (None: this one) writes it."""
    return final.with_name(f".{final.name}.{os.getpid() if pid is None else pid}.tmp")


_locks: dict[Path, int] = {}  # temporary folders that this process writes -> descriptor with their lock


def _hold(temporary: Path) -> None:
    """Lock a temporary folder until `_release`, or the end of this process. Its pid may be another's by then."""
    descriptor = locked(temporary)
    if descriptor is not None:
        _locks[temporary] = descriptor


def _release(temporary: Path) -> None:
    if (descriptor := _locks.pop(temporary, None)) is not None:
        os.close(descriptor)


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def temporary_folder(final: Path) -> Iterator[Path]:
    """A new folder ".NAME.TOKEN.tmp" beside `final`, deleted afterwards unless renamed. Raises OSError."""
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
    """A descriptor that holds a folder's lock until closed; None if another has it. Free on a disk without locks."""
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
