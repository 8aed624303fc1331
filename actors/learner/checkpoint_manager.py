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
from areal_bus.storage import best_checkpoints, head_checkpoints, versioned_dirs
from areal_bus.storage.best_checkpoints import BestRule


@dataclass(frozen=True, slots=True)
class StartPoint:
    """A version and its checkpoint folder; "" for version 0 from the model folder."""

    version: int
    folder: str


def choose(run: Path, *, every_steps: int, warn: Callable[[str], None]) -> StartPoint:
    """The newest version whose checkpoint and head checkpoint verify; `warn` receives the reason for each that does
    not.

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
    """Whether the only checkpoint is the first of a run and the head has written none yet."""
    if every_steps:
        return not any(version > every_steps or has_frontier(run, version) for version in sealed)
    return not sealed or (len(sealed) == 1 and not any(head_checkpoints.versions(run / "frontiers")))


def forget_newer(run: Path, version: int) -> list[Path]:
    """Remove checkpoints above `version`, whose training was rolled back. Returns their versions."""
    return versioned_dirs.discard_above(run / "checkpoints", version)


def has_frontier(run: Path, version: int) -> bool:
    """Whether a head checkpoint of this version exists."""
    return head_checkpoints.path_of(run / "frontiers", version).is_file()


def _check(run: Path, version: int, path: Path) -> None:
    """Raises CheckpointError unless a run can resume from this version."""
    checkpoint.verify(path)
    checkpoint.version_of(path)
    if version:
        frontier = head_checkpoints.load(head_checkpoints.path_of(run / "frontiers", version))
        if frontier.version != version:
            raise CheckpointError(f"a frontier has the name of its version: that of {version} is of {frontier.version}")


NO_BEST = BestRule(0, 0)
LEAST_TIMES = 20  # a checkpoint by time waits this many times its duration: they take at most 1/20 of the time
MOST_DOUBLINGS = 30
FIRST_S = 60.0  # the first checkpoint by time; each later one waits twice as long, up to checkpoint.every_s


class CheckpointManager:
    """When this rank checkpoints and where it resumes; only rank 0 (`is_root`) chooses and writes."""

    def __init__(
        self,
        run: Path,
        settings: CheckpointConfig,
        *,
        journal: Journal,
        is_root: bool,
        sealed: Callable[[int, str], None],
        best: BestRule = NO_BEST,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`sealed(version, folder)` runs for each complete checkpoint; `best`: which stay for their evaluation.

        `now` is a clock in seconds.
        """
        self.folder = ""  # of the newest known checkpoint; "" if none
        self._version: int | None = None  # its version
        self._run = run
        self._settings = settings
        self._journal = journal
        self._is_root = is_root
        self._sealed = sealed
        self._best = best
        self._now = now
        self._tried = now()  # time of the last checkpoint or failure; at first the start of the process
        self._n_tried = 0  # checkpoints by time or steps of this process
        self._took_s = 0.0  # duration of the last checkpoint

    def choose(self) -> StartPoint:
        """Choose the start version and remove newer checkpoints. Raises CheckpointError."""
        beginning = choose(self._run, every_steps=self._settings.every_steps, warn=self._warn)
        for path in forget_newer(self._run, beginning.version):
            self._warn(f"{path.name} is removed: this term begins at version {beginning.version}, before it")
        return beginning

    def restore(self, actor: PPOActor, beginning: StartPoint) -> None:
        """Restore optimizer, RNG, version and rounded parameters into an actor that has the weights."""
        folder = Path(beginning.folder)
        state = checkpoint.read(folder)
        checkpoint.restore(state, policy=actor.policy, optimizer=actor.optimizer)
        if actor.critic is not None:
            checkpoint.restore_critic(folder, actor.critic)
        actor.version = state.version
        self._version, self.folder = state.version, str(folder)
        if self._is_root:
            sentence = f"begins at version {state.version} from checkpoint {folder}"
            logger.info("learner-0 {}", sentence)
            self._journal.write(Event.NOTE, text=sentence)

    def is_due(self, actor: PPOActor) -> bool:
        """Whether a checkpoint is due, by version or by the clock of rank 0. A collective when sharded."""
        every, version = self._settings.every_steps, actor.version
        if every and version % every == 0:
            return version > 0 or every == 1
        if self._best.is_due(version):
            return True
        if not (version and self._settings.every_s):
            return False
        interval_s = min(self._settings.every_s, FIRST_S * 2**self._n_tried)
        least_s = max(interval_s, LEAST_TIMES * self._took_s)
        is_late = self._is_root and self._now() - self._tried >= least_s
        return bool(actor.policy.ranks.max([float(is_late)])[0])

    def keep(self, actor: PPOActor, tokenizer: Any) -> None:
        """Write a checkpoint that is due. A disk error skips it with a warning.

        A collective when sharded, as `finish`.
        """
        try:
            self.finish(actor, tokenizer)
        except CheckpointError as error:
            if self._is_root:
                self._warn(f"training goes on, and could come back from an older checkpoint only: {error}")
        finally:
            self._tried = self._now()
            self._n_tried = min(self._n_tried + 1, MOST_DOUBLINGS)

    def finish(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint the current version unless that is done. Raises CheckpointError on a disk error."""
        version = actor.version
        if version == self._version:
            return
        actor.check_whole()
        began, values = self._now(), best_checkpoints.read(self._run)
        with self._journal.span("checkpoint"):
            folder = checkpoint.save(
                self._run / "checkpoints",
                policy=actor.policy,
                optimizer=actor.optimizer,
                version=version,
                tokenizer=tokenizer,
                keep=self._settings.keep,
                counts=lambda other: has_frontier(self._run, other),
                is_best=lambda other: self._best.keeps(other, values),
                reference=actor.kept_reference,
                critic=actor.critic,
            )
        self._version, self.folder = version, str(folder)
        self._took_s = self._now() - began
        if self._is_root:
            self._journal.write(Event.CHECKPOINT, step=version, folder=str(folder), seconds=round(self._took_s, 6))
        self._sealed(version, str(folder))

    def sealed(self) -> list[int]:
        """Versions with a checkpoint on disk."""
        return sorted(versioned_dirs.versions(self._run / "checkpoints"))

    def export(self) -> str:
        """Link RUN/model to the transformers folder of the newest checkpoint."""
        model = self._run / "model"
        if self._is_root:
            checkpoint.link(model, Path(self.folder) / "model")
            self._journal.write(Event.EXPORT, folder=str(model))
        return str(model)

    def _warn(self, sentence: str) -> None:
        logger.warning(sentence)
        self._journal.write(Event.NOTE, text=sentence)
