"""A workflow with one poisoned prompt: the process that samples this prompt dies."""

import os
import signal
from pathlib import Path

from actors.workflows.protocol import Ask, Episode, Row
from actors.workflows.single_turn import SingleTurn
from areal_bus.config.sections import Config

FOLDER = Path(os.environ.get("AREAL_FAULTS", "/nowhere"))


class Poison:
    """Single turn, but for the prompt that the test has written down."""

    def __init__(self, config: Config) -> None:
        self._single = SingleTurn(config)
        try:
            self._poison = (FOLDER / "poison").read_text()
        except OSError:
            self._poison = ""

    async def episode(self, row: Row, ask: Ask) -> Episode:
        """Samples it first: it dies with tokens, as an out-of-memory does."""
        episode = await self._single.episode(row, ask)
        if row["question"] == self._poison:
            os.kill(os.getpid(), signal.SIGKILL)
        return episode
