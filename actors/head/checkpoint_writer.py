"""Writes and deletes head checkpoints (RUN/frontiers) on a thread, in the order in which the head decided."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from areal_bus.core.effects import Discard, Save
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint
from areal_bus.core.parts.terms import slot
from areal_bus.errors import CheckpointError
from areal_bus.storage import head_checkpoints, versioned_dirs

SETTLE_S = 60.0  # longest wait for the writes before


class HeadCheckpointWriter:
    """Writes RUN/frontiers while the head continues: head checkpoints are immutable."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        head_checkpoints.tidy(folder)
        self._work: queue.SimpleQueue[Save | Discard | threading.Event | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[HeadCheckpoint] = queue.SimpleQueue()
        self._undiscarded: set[Path] = set()  # files that could not be deleted
        self._thread = threading.Thread(target=self._run, name="frontiers", daemon=True)
        self._thread.start()

    def load(self) -> dict[int, HeadCheckpoint]:
        """All complete checkpoints by version, and the initial state."""
        found = {
            version: head_checkpoints.load(head_checkpoints.path_of(self._folder, version))
            for version in head_checkpoints.usable(self._folder)
        }
        return {**START, **found}

    def waypoints(self) -> list[HeadSavepoint]:
        """States from which a learner that survived the head may continue."""
        return head_checkpoints.waypoints(self._folder)

    def mark(self, waypoint: HeadSavepoint) -> None:
        """Write a savepoint before returning. If that fails, a restarted head goes back to a checkpoint; where an older
        savepoint has the slot, CheckpointError is raised.
        """
        version = waypoint.checkpoint.version
        try:
            head_checkpoints.mark(self._folder, waypoint)
        except OSError as error:
            logger.warning("no savepoint of version {}: if the head dies, this version is lost: {}", version, error)
            if any(slot(other) == slot(waypoint) for other in head_checkpoints.waypoints(self._folder)):
                raise CheckpointError(
                    f"a savepoint must replace an older one before its batch is sent: that of version {version} was "
                    f"not written: {error}"
                ) from error

    def drop_waypoints(self) -> None:
        """Delete all savepoints, as far as possible: the run is over."""
        head_checkpoints.drop_waypoints(self._folder)

    def do(self, effect: Save | Discard) -> None:
        self._work.put(effect)

    def save_now(self, checkpoint: HeadCheckpoint) -> None:
        """Write it, after all others, before returning. Raises CheckpointError if the write fails."""
        self.settle(SETTLE_S, version=checkpoint.version)
        path = head_checkpoints.path_of(self._folder, checkpoint.version)
        try:
            head_checkpoints.save(path, checkpoint)
        except OSError as error:
            raise CheckpointError(f"a change of the split needs a head checkpoint: {path}: {error}") from error

    def settle(self, timeout_s: float, *, version: int) -> None:
        """Finish all writes; delete checkpoints after `version`, where a term begins. Raises CheckpointError."""
        if lost := tuple(other for other in head_checkpoints.versions(self._folder) if other > version):
            self._work.put(Discard(lost))
        done = threading.Event()
        self._work.put(done)
        if not done.wait(timeout_s) or self._undiscarded:
            left = ", ".join(path.name for path in sorted(self._undiscarded)) or f"after {timeout_s:g} s some"
            raise CheckpointError(
                f"cannot delete head checkpoints after version {version}: {left} in {self._folder}; no term may begin "
                "before that: check that the disk is writable"
            )

    def saved(self) -> Iterator[HeadCheckpoint]:
        """Checkpoints written since the last call."""
        while not self._done.empty():
            yield self._done.get()

    def close(self, timeout_s: float) -> None:
        """Return when everything is on disk, or after the timeout."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (effect := self._work.get()) is not None:
            if isinstance(effect, Save):
                self._save(effect.checkpoint)
            elif isinstance(effect, Discard):
                self._discard(effect.versions)
            else:
                effect.set()

    def _discard(self, versions: tuple[int, ...]) -> None:
        for version in versions:
            path = head_checkpoints.path_of(self._folder, version)
            try:
                head_checkpoints.discard(path)
                self._undiscarded.discard(path)
            except OSError as error:
                logger.warning("the head checkpoint of version {} cannot be deleted: {}", version, error)
                self._undiscarded.add(path)

    def _save(self, frontier: HeadCheckpoint) -> None:
        """If the write fails, this version cannot be resumed; the checkpoint before it is kept."""
        try:
            head_checkpoints.save(head_checkpoints.path_of(self._folder, frontier.version), frontier)
            self._done.put(frontier)
        except (OSError, CheckpointError) as error:
            logger.warning("version {} has no head checkpoint: {}", frontier.version, error)


def newest_checkpoint(run: Path, version: int) -> str:
    """Folder of the newest model checkpoint, up to `version`, that has a head checkpoint; "" if there is none."""
    for found, path in versioned_dirs.versions(run / "checkpoints").items():
        if found <= version and head_checkpoints.path_of(run / "frontiers", found).is_file():
            return str(path)
    return ""
