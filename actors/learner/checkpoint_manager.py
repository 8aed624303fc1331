"""When checkpoints are written and pruned, and which one a learner resumes from."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loguru import logger

from actors.learner import checkpoint
from actors.learner.ppo import PPOActor
from areal_bus.config.sections import CheckpointConfig
from areal_bus.core.events import Event
from areal_bus.errors import CheckpointError
from areal_bus.journal import Journal
from areal_bus.storage import head_checkpoints, versioned_dirs


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A version, and the checkpoint that holds it; "" for version 0 as the model's own folder has it."""

    version: int
    folder: str


def choose(run: Path, *, every_steps: int, warn: Callable[[str], None]) -> StartPoint:
    """The newest version whose checkpoint and whose frontier verify; `warn` hears of each that does not, and why.

    Version 0 needs neither. A whole checkpoint without a frontier is one that was never finished: when it is the first
    of a run (not above `every_steps`; without those, the only one of a run without any frontier), the run begins at
    version 0 again. Raises CheckpointError when there are checkpoints and none can be gone back to.
    """
    folder = run / "checkpoints"
    versioned_dirs.tidy(folder)
    refused: dict[int, str] = {}
    for version, path in versioned_dirs.versions(folder).items():
        try:
            _check(run, version, path)
        except CheckpointError as error:
            refused[version] = str(error)
            warn(f"version {version} cannot be gone back to, an older one is used: {error}")
        else:
            return StartPoint(version, str(path))
    if not _is_first(run, [version for version in refused if version], every_steps):
        reasons = "; ".join(refused.values())
        raise CheckpointError(
            f"a run goes on from a checkpoint whose files are whole: none in {folder} is ({reasons}); remove that "
            "folder to begin at version 0 again"
        )
    return StartPoint(0, "")


def _is_first(run: Path, sealed: list[int], every_steps: int) -> bool:
    """Whether these checkpoints are at most the first one of a run, of which the head has written nothing."""
    if every_steps:
        return not any(version > every_steps or has_frontier(run, version) for version in sealed)
    return not sealed or (len(sealed) == 1 and not any(head_checkpoints.versions(run / "frontiers")))


def forget_newer(run: Path, version: int) -> list[Path]:
    """Remove the checkpoints above `version`: the timeline they belong to is lost. Returns which they were."""
    return versioned_dirs.discard_above(run / "checkpoints", version)


def has_frontier(run: Path, version: int) -> bool:
    """Whether the head has written what belongs to a checkpoint of this version, too."""
    return head_checkpoints.path_of(run / "frontiers", version).is_file()


def _check(run: Path, version: int, path: Path) -> None:
    """Raises CheckpointError unless this version can be gone back to."""
    checkpoint.verify(path)
    checkpoint.version_of(path)
    if version:
        frontier = head_checkpoints.load(head_checkpoints.path_of(run / "frontiers", version))
        if frontier.version != version:
            raise CheckpointError(f"a frontier has the name of its version: that of {version} is of {frontier.version}")


LEAST_TIMES = 20  # a checkpoint by time waits so many times as long as the last one took: a twentieth of the time


class CheckpointManager:
    """RUN/checkpoints as one rank sees them: only rank 0 (`is_root`) chooses, writes and speaks."""

    def __init__(
        self,
        run: Path,
        settings: CheckpointConfig,
        *,
        journal: Journal,
        is_root: bool,
        sealed: Callable[[int, str], None],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sealed(version, folder)` is called for each checkpoint that is whole; `now` is a clock in seconds."""
        self.folder = ""  # of the newest checkpoint that this life knows; "" if none
        self._version: int | None = None  # which it is of
        self._run = run
        self._settings = settings
        self._journal = journal
        self._is_root = is_root
        self._sealed = sealed
        self._now = now
        self._tried = now()  # when the last checkpoint was there, or refused; at first: when this life began
        self._took_s = 0.0  # the last one

    def choose(self) -> StartPoint:
        """The version that this life begins with; the run holds nothing newer afterwards. Raises CheckpointError."""
        beginning = choose(self._run, every_steps=self._settings.every_steps, warn=self._warn)
        for path in forget_newer(self._run, beginning.version):
            self._warn(f"{path.name} is removed: this term begins at version {beginning.version}, before it")
        return beginning

    def restore(self, actor: PPOActor, beginning: StartPoint) -> None:
        """Optimizer, RNG, version and rounded parameters, into an actor with the checkpoint's model."""
        folder = Path(beginning.folder)
        state = checkpoint.read(folder)
        checkpoint.restore(state, policy=actor.policy, optimizer=actor.optimizer)
        actor.version = state.version
        self._version, self.folder = state.version, str(folder)
        if self._is_root:
            sentence = f"begins at version {state.version} from checkpoint {folder}"
            logger.info("learner-0 {}", sentence)
            self._journal.write(Event.NOTE, text=sentence)

    def is_due(self, actor: PPOActor) -> bool:
        """Whether the actor's version is to be kept: by its number, or by rank 0's clock. A collective when sharded."""
        every, version = self._settings.every_steps, actor.version
        if every and version % every == 0:
            return version > 0 or every == 1
        if not (version and self._settings.every_s):
            return False
        least_s = max(self._settings.every_s, LEAST_TIMES * self._took_s)
        is_late = self._is_root and self._now() - self._tried >= least_s
        return bool(actor.policy.ranks.max([float(is_late)])[0])

    def keep(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint a version that is due. One that the disk does not take is left out, with a warning.

        A collective when sharded, as `finish`.
        """
        try:
            self.finish(actor, tokenizer)
        except CheckpointError as error:
            if self._is_root:
                self._warn(f"training goes on, and could come back from an older checkpoint only: {error}")
        finally:
            self._tried = self._now()

    def finish(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint the version that there is, unless it is. Raises CheckpointError when the disk does not take it."""
        version = actor.version
        if version == self._version:
            return
        actor.check_whole()
        began = self._now()
        with self._journal.span("checkpoint"):
            folder = checkpoint.save(
                self._run / "checkpoints",
                policy=actor.policy,
                optimizer=actor.optimizer,
                version=version,
                tokenizer=tokenizer,
                keep=self._settings.keep,
                counts=lambda other: has_frontier(self._run, other),
            )
        self._version, self.folder = version, str(folder)
        self._took_s = self._now() - began
        if self._is_root:
            self._journal.write(Event.CHECKPOINT, step=version, folder=str(folder), seconds=round(self._took_s, 6))
        self._sealed(version, str(folder))

    def sealed(self) -> list[int]:
        """Versions whose checkpoints are on disk."""
        return sorted(versioned_dirs.versions(self._run / "checkpoints"))

    def export(self) -> str:
        """RUN/model, a link to the transformers folder of the newest checkpoint."""
        model = self._run / "model"
        if self._is_root:
            checkpoint.link(model, Path(self.folder) / "model")
            self._journal.write(Event.EXPORT, folder=str(model))
        return str(model)

    def _warn(self, sentence: str) -> None:
        logger.warning(sentence)
        self._journal.write(Event.NOTE, text=sentence)
