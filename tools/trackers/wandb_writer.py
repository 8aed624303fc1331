"""Writes to Weights & Biases. Account, project and mode come from its own settings (WANDB_MODE, WANDB_PROJECT, ...)."""

import os
from collections.abc import Sequence

import wandb

from areal_bus.errors import ConfigError
from tools.run import Line
from tools.trackers.protocol import SAMPLE_COLUMNS, Target
from tools.trackers.series import Row


class WandbWriter:
    """One W&B run. Its x-axis is the logged `version`, because its own step may only grow."""

    takes_undo = False
    is_rewritten = False
    takes_samples = True

    def __init__(self, target: Target) -> None:
        settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "areal-bus"),
                dir=str(target.folder),
                id=target.identity,
                name=target.name,
                config=target.config,
                resume="allow",
                settings=settings,
            )
        except (wandb.Error, wandb.errors.UsageError) as error:
            raise ConfigError(f"W&B must open a run (wandb login, or WANDB_MODE=offline): {error}") from None
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="version")

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log({"version": row.step, **row.values})

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        data = [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in samples]
        self._run.log({"version": version, "samples": wandb.Table(columns=list(SAMPLE_COLUMNS), data=data)})

    def close(self) -> None:
        self._run.finish()
