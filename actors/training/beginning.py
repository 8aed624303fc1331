"""Where a learner begins: the newest version that all its files are whole of; knows nothing of what is in them."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from actors.training import checkpoint, shelf
from areal_bus import frontier_file
from areal_bus.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Beginning:
    """A version, and the checkpoint that holds it; "" for version 0 as the model's own folder has it."""

    version: int
    folder: str


def choose(run: Path, *, every_steps: int, warn: Callable[[str], None]) -> Beginning:
    """The newest version whose checkpoint and whose frontier verify; `warn` hears of each that does not, and why.

    Version 0 needs neither. A whole checkpoint without a frontier is one that was never finished: when it is the first
    of a run (not above `every_steps`; without those, the only one of a run without any frontier), the run begins at
    version 0 again. Raises CheckpointError when there are checkpoints and none can be gone back to.
    """
    folder = run / "checkpoints"
    shelf.tidy(folder)
    refused: dict[int, str] = {}
    for version, path in shelf.versions(folder).items():
        try:
            _check(run, version, path)
        except CheckpointError as error:
            refused[version] = str(error)
            warn(f"version {version} cannot be gone back to, an older one is used: {error}")
        else:
            return Beginning(version, str(path))
    if not _is_first(run, [version for version in refused if version], every_steps):
        reasons = "; ".join(refused.values())
        raise CheckpointError(
            f"a run goes on from a checkpoint whose files are whole: none in {folder} is ({reasons}); remove that "
            "folder to begin at version 0 again"
        )
    return Beginning(0, "")


def _is_first(run: Path, sealed: list[int], every_steps: int) -> bool:
    """Whether these checkpoints are at most the first one of a run, of which the head has written nothing."""
    if every_steps:
        return not any(version > every_steps or has_frontier(run, version) for version in sealed)
    return not sealed or (len(sealed) == 1 and not any(frontier_file.versions(run / "frontiers")))


def forget_newer(run: Path, version: int) -> list[Path]:
    """Remove the checkpoints above `version`: the timeline they belong to is lost. Returns which they were."""
    return shelf.discard_above(run / "checkpoints", version)


def has_frontier(run: Path, version: int) -> bool:
    """Whether the head has written what belongs to a checkpoint of this version, too."""
    return frontier_file.path_of(run / "frontiers", version).is_file()


def _check(run: Path, version: int, path: Path) -> None:
    """Raises CheckpointError unless this version can be gone back to."""
    checkpoint.verify(path)
    checkpoint.version_of(path)
    if version:
        frontier = frontier_file.load(frontier_file.path_of(run / "frontiers", version))
        if frontier.version != version:
            raise CheckpointError(f"a frontier has the name of its version: that of {version} is of {frontier.version}")
