"""Copies complete checkpoints to another file system (any that fsspec has), and the model of the end to a hub.

A thread of rank 0 does it beside training. At the target, step-000010.partial/ is a copy that may be incomplete. It is
renamed to step-000010/, and then step-000010.complete is written with the hash of its manifest: object stores have no
atomic rename of a folder. Only a copy of the same version that is incomplete, or was trained again, is replaced.
"""

import contextlib
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import write_atomic
from areal_bus.storage.versioned_dirs import MANIFEST

WAITS_S = (1.0, 5.0, 20.0, 60.0)  # between two attempts at a checkpoint
PARTIAL, COMPLETE = ".partial", ".complete"
OWNER = "upload.id"  # in a run and at its target


def file_system(url: str) -> tuple[Any, str]:
    """(fsspec's file system, path in it). Raises ConfigError for a protocol that is unknown or lacks its package."""
    import fsspec  # torch has it

    try:
        return fsspec.core.url_to_fs(url)  # type: ignore[no-any-return]
    except (ImportError, ValueError) as error:
        raise ConfigError(f'checkpoint.upload = "{url}" cannot be used: {error}') from error


def check_hub(repository: str) -> None:
    """Raises ConfigError where a push to the hub cannot work: offline, or a name of another form."""
    user, slash, name = repository.partition("/")
    if not (user and slash and name) or "/" in name:
        raise ConfigError(f'checkpoint.push_to_hub must be "USER/NAME": it is {repository!r}')
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
        raise ConfigError(
            f'offline: checkpoint.push_to_hub = "{repository}" needs the hub; unset HF_HUB_OFFLINE, or remove the key'
        )


def push_to_hub(folder: Path, repository: str, *, endpoint: str | None = None) -> None:
    """Upload a model folder; the token is that of `hf auth login` or HF_TOKEN. A new repository is private."""
    from huggingface_hub import HfApi

    api = HfApi(endpoint=endpoint)
    api.create_repo(repository, private=True, exist_ok=True)
    api.upload_folder(repo_id=repository, folder_path=folder, commit_message=f"Model of {folder.resolve().parent.name}")


def claim(folder: Path, file_systems: Any, root: str) -> None:
    """Mark the target as that of this run. Raises ConfigError for one of another run, whose checkpoints a copy would
    replace, and for the folder of the checkpoints themselves.
    """
    from fsspec.implementations.local import LocalFileSystem  # torch has it

    if isinstance(file_systems, LocalFileSystem) and Path(root).resolve() == folder.resolve().parent:
        raise ConfigError(f"wrong target: {root} is the run's own folder of checkpoints; set another checkpoint.upload")
    own, mark = folder.parent.parent / OWNER, f"{root}/{OWNER}"
    if not own.exists():
        write_atomic(own, secrets.token_hex(16))
    if not file_systems.exists(mark) or not file_systems.cat_file(mark):  # a killed run may leave it empty
        file_systems.makedirs(root, exist_ok=True)
        file_systems.pipe_file(mark, own.read_bytes())
    if file_systems.cat_file(mark) != own.read_bytes():
        raise ConfigError(f"target taken: {root} has checkpoints of another run; set another checkpoint.upload")


def copy(folder: Path, file_systems: Any, root: str) -> None:
    """Copy a checkpoint to `root` of a file system of fsspec. Raises what that raises."""
    root = root.rstrip("/")
    claim(folder, file_systems, root)
    final = f"{root}/{folder.name}"
    digest = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest().encode()
    if file_systems.exists(final + COMPLETE) and file_systems.cat_file(final + COMPLETE) == digest:
        return
    for leftover in (final + COMPLETE, final + PARTIAL, final):
        if file_systems.exists(leftover):
            file_systems.rm(leftover, recursive=True)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            target = f"{final}{PARTIAL}/{path.relative_to(folder).as_posix()}"
            file_systems.makedirs(target.rpartition("/")[0], exist_ok=True)
            file_systems.put_file(str(path), target)
    file_systems.mv(final + PARTIAL, final, recursive=True)
    file_systems.pipe_file(final + COMPLETE, digest)


class Uploads:
    """Uploads checkpoints in order on a thread. A failure is retried, then reported; training never waits for it."""

    def __init__(self, url: str, *, waits_s: Sequence[float] = WAITS_S) -> None:
        """Raises ConfigError as `file_system`."""
        self._file_system, self._root = file_system(url)
        self._url = url
        self._waits_s = waits_s
        self._queue: list[Path] = []
        self._notes: list[str] = []
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    def add(self, folder: Path) -> None:
        """Queue a complete checkpoint. It must stay until `holds` no longer has it."""
        with self._changed:
            if folder not in self._queue:
                self._queue.append(folder)
                self._changed.notify_all()

    def holds(self, name: str) -> bool:
        """Whether the folder of this name still waits, or is being copied."""
        with self._changed:
            return any(folder.name == name for folder in self._queue)

    def take_notes(self) -> list[str]:
        """What happened since the last call, a sentence each."""
        with self._changed:
            notes, self._notes = self._notes, []
        return notes

    def finish(self, tick: Callable[[], None], *, poll_s: float = 0.5) -> None:
        """Wait until each queued checkpoint is copied or given up; `tick` may raise."""
        while True:
            with self._changed:
                if not self._queue:
                    return
                self._changed.wait(poll_s)
            tick()

    def close(self) -> None:
        """End the thread after its current file."""
        self._stopped.set()
        with self._changed:
            self._queue.clear()
            self._changed.notify_all()

    def _run(self) -> None:
        while not self._stopped.is_set():
            with self._changed:
                while not self._queue and not self._stopped.is_set():
                    self._changed.wait()
                folder = self._queue[0] if self._queue else None
            if folder is not None:
                note = self._upload(folder)
                with self._changed:
                    self._notes.append(note)
                    with contextlib.suppress(ValueError):  # closed
                        self._queue.remove(folder)
                    self._changed.notify_all()

    def _upload(self, folder: Path) -> str:
        """A sentence on what came of it."""
        for wait_s in (*self._waits_s, None):
            try:
                copy(folder, self._file_system, self._root)
            except Exception as error:  # noqa: BLE001 (a file system of fsspec raises what its library raises)
                if wait_s is None or self._stopped.is_set() or isinstance(error, ConfigError):
                    n = 1 if isinstance(error, ConfigError) else len(self._waits_s) + 1
                    what = f"checkpoint not uploaded: {folder.name} to {self._url}, {n} attempts"
                    return f"{what}: {error!r}; training goes on"
                self._stopped.wait(wait_s)
            else:
                return f"uploaded {folder.name} to {self._url}"
        raise AssertionError("the last attempt returns")
