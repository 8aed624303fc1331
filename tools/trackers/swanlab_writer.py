"""Writes to SwanLab. Account, workspace and mode come from its own settings (SWANLAB_MODE, SWANLAB_API_KEY, ...)."""

import json
import os
from collections.abc import Sequence

import swanlab

from areal_bus.errors import ConfigError
from tools.run import Line
from tools.trackers.protocol import SAMPLE_COLUMNS, Target
from tools.trackers.series import Row


class SwanlabWriter:
    """One SwanLab run of the project SWANLAB_PROJECT, else `areal-bus`."""

    takes_undo = False
    is_rewritten = False
    takes_samples = True

    def __init__(self, target: Target) -> None:
        try:
            self._run = swanlab.init(
                project=os.environ.get("SWANLAB_PROJECT", "areal-bus"),
                name=target.name,
                id=target.identity,
                resume="allow",
                log_dir=str(target.folder),
                config=target.config,
            )
        except (RuntimeError, ValueError) as error:
            raise ConfigError(f"SwanLab must open a run (swanlab login, or SWANLAB_MODE=offline): {error}") from None

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        texts = [json.dumps({name: sample.get(name) for name in SAMPLE_COLUMNS}) for sample in samples]
        self._run.log({"samples": [swanlab.Text(text) for text in texts]}, step=version)

    def close(self) -> None:
        self._run.finish()
