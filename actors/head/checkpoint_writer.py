"""Writes the head's frontiers on a thread of its own, in the order of its decisions; knows no decision."""

import queue
import threading
from collections.abc import Iterator
from pathlib import Path

from loguru import logger

from areal_bus.core.effects import Discard, Save
from areal_bus.core.head_checkpoint import START, HeadCheckpoint, HeadSavepoint
from areal_bus.core.terms import slot
from areal_bus.errors import CheckpointError
from areal_bus.storage.head_checkpoints import discard, load, mark, path_of, save, tidy, usable, versions, waypoints


class HeadCheckpointWriter:
    """RUN/frontiers. The head decides while a file is written: frontiers are frozen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        tidy(folder)
        self._work: queue.SimpleQueue[Save | Discard | threading.Event | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[HeadCheckpoint] = queue.SimpleQueue()
        self._undiscarded: set[Path] = set()  # the disk did not let them go
        self._thread = threading.Thread(target=self._run, name="frontiers", daemon=True)
        self._thread.start()

    def load(self) -> dict[int, HeadCheckpoint]:
        """All that are whole, and the one before the first prompt."""
        found = {version: load(path_of(self._folder, version)) for version in usable(self._folder)}
        return {**START, **found}

    def waypoints(self) -> list[HeadSavepoint]:
        """What a learner that has outlived the head may be at."""
        return waypoints(self._folder)

    def mark(self, waypoint: HeadSavepoint) -> None:
        """It is written when this returns. One that cannot be sends a learner that outlives the head back.

        Raises CheckpointError when an older one stays in its place.
        """
        version = waypoint.frontier.version
        try:
            mark(self._folder, waypoint)
        except OSError as error:
            logger.warning("should the head die, version {} is lost: {}", version, error)
            if any(slot(other) == slot(waypoint) for other in waypoints(self._folder)):
                raise CheckpointError(f"no batch goes out beside an older waypoint: {version}") from error

    def do(self, effect: Save | Discard) -> None:
        self._work.put(effect)

    def settle(self, timeout_s: float, *, version: int) -> None:
        """Return when all that was ordered is on disk, and nothing of a later version. Raises CheckpointError when it
        is not, or the time is over.

        A term at `version` waits for it: a frontier of a lost timeline, were it one that could not be read, must not
        lie beside the next checkpoint of its version.
        """
        if lost := tuple(other for other in versions(self._folder) if other > version):
            self._work.put(Discard(lost))
        done = threading.Event()
        self._work.put(done)
        if not done.wait(timeout_s) or self._undiscarded:
            left = ", ".join(path.name for path in sorted(self._undiscarded)) or f"after {timeout_s:g} s some"
            raise CheckpointError(
                f"a term begins when frontiers of lost ones are gone: {left} in {self._folder} are not"
            )

    def saved(self) -> Iterator[HeadCheckpoint]:
        """Those that came to be on disk since the last call."""
        while not self._done.empty():
            yield self._done.get()

    def close(self, timeout_s: float) -> None:
        """Return when everything is on disk, or the time is over."""
        self._work.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (effect := self._work.get()) is not None:
            if isinstance(effect, Save):
                self._save(effect.frontier)
            elif isinstance(effect, Discard):
                self._discard(effect.versions)
            else:
                effect.set()

    def _discard(self, versions: tuple[int, ...]) -> None:
        for version in versions:
            path = path_of(self._folder, version)
            try:
                discard(path)
                self._undiscarded.discard(path)
            except OSError as error:
                logger.warning("the frontier of version {} cannot be removed: {}", version, error)
                self._undiscarded.add(path)

    def _save(self, frontier: HeadCheckpoint) -> None:
        """One that cannot be written makes its checkpoint one that nobody goes back to: the one before stays."""
        try:
            save(path_of(self._folder, frontier.version), frontier)
            self._done.put(frontier)
        except (OSError, CheckpointError) as error:
            logger.warning("the checkpoint of version {} has no frontier: {}", frontier.version, error)


def newest_checkpoint(run: Path, version: int) -> str:
    """Folder of the newest checkpoint, up to `version`, whose frontier is on disk; "" if there is none."""
    found = {int(path.name.removeprefix("step-")): path for path in (run / "checkpoints").glob("step-*")}
    sound = [v for v in found if v <= version and path_of(run / "frontiers", v).is_file()]
    return str(found[max(sound)]) if sound else ""
