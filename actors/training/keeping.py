"""The checkpoints of one life: where it begins, when it writes one, what a full disk means; knows no messages."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loguru import logger

from actors.training import checkpoint, shelf
from actors.training.actor import PPOActor
from actors.training.beginning import Beginning, choose, forget_newer, has_frontier
from areal_bus.config import CheckpointConfig
from areal_bus.errors import CheckpointError
from areal_bus.journal import Event, Journal

LEAST_TIMES = 20  # a checkpoint by time waits so many times as long as the last one took: a twentieth of the time


class Keeper:
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

    def choose(self) -> Beginning:
        """The version that this life begins with; the run holds nothing newer afterwards. Raises CheckpointError."""
        beginning = choose(self._run, every_steps=self._settings.every_steps, warn=self._warn)
        for path in forget_newer(self._run, beginning.version):
            self._warn(f"{path.name} is removed: this term begins at version {beginning.version}, before it")
        return beginning

    def restore(self, actor: PPOActor, beginning: Beginning) -> None:
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
        return sorted(shelf.versions(self._run / "checkpoints"))

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
