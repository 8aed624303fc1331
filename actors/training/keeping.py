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
    ) -> None:
        """`sealed(version, folder)` hears of each checkpoint that is whole."""
        self.folder = ""  # of the newest checkpoint that this life knows; "" if none
        self._version: int | None = None  # which it is of
        self._run = run
        self._settings = settings
        self._journal = journal
        self._is_root = is_root
        self._sealed = sealed

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

    def keep(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint a version that is due (1: every one, 0 too). One that the disk does not take is left out, loudly.

        A collective when sharded, as `finish`.
        """
        every = self._settings.every_steps
        if every and actor.version % every == 0 and (actor.version or every == 1):
            try:
                self.finish(actor, tokenizer)
            except CheckpointError as error:
                if self._is_root:
                    self._warn(f"training goes on, and could come back from an older checkpoint only: {error}")

    def finish(self, actor: PPOActor, tokenizer: Any) -> None:
        """Checkpoint the version that there is, unless it is. Raises CheckpointError when the disk does not take it."""
        version = actor.version
        if version == self._version:
            return
        actor.check_whole()
        began = time.monotonic()
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
        if self._is_root:
            seconds = round(time.monotonic() - began, 6)
            self._journal.write(Event.CHECKPOINT, step=version, folder=str(folder), seconds=seconds)
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
