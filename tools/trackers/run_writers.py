"""Writes to W&B, Trackio and SwanLab, whose runs have `log` and `finish`.

Account and mode come from their own settings (WANDB_MODE, TRACKIO_SPACE_ID, SWANLAB_API_KEY, ...). Trackio has a local
database (TRACKIO_DIR), which `trackio show` opens.
"""

import json
import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from areal_bus.errors import ConfigError
from tools.run import Line
from tools.trackers.protocol import SAMPLE_COLUMNS, Target
from tools.trackers.series import Row


class RunWriter:
    """One run of a tracker."""

    takes_undo = False
    is_rewritten = False
    takes_samples = True

    def __init__(
        self, run: Any, log: Callable[[int, dict[str, Any]], None], table: Callable[[list[list[Any]]], Any]
    ) -> None:
        """`table`: what shows rows of SAMPLE_COLUMNS."""
        self._run, self._log, self._table = run, log, table

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._log(row.step, dict(row.values))

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        rows = [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in samples]
        self._log(version, {"samples": self._table(rows)})

    def close(self) -> None:
        self._run.finish()


def project(name: str) -> str:
    return os.environ.get(f"{name}_PROJECT", "areal-bus")


def wandb_writer(target: Target) -> RunWriter:
    """Its x-axis is the logged `version`, because W&B's own step may only grow."""
    wandb = import_module("wandb")
    settings = wandb.Settings(silent=True, console="off", x_disable_stats=True)
    common = {"project": project("WANDB"), "name": target.name, "id": target.identity, "config": target.config}
    try:
        run = wandb.init(**common, dir=str(target.folder), resume="allow", settings=settings)
    except (wandb.Error, wandb.errors.UsageError) as error:
        raise ConfigError(f"W&B must open a run (wandb login, or WANDB_MODE=offline): {error}") from None
    run.define_metric("version")
    run.define_metric("*", step_metric="version")
    return RunWriter(
        run,
        lambda step, values: run.log({"version": step, **values}),
        lambda rows: wandb.Table(columns=list(SAMPLE_COLUMNS), data=rows),
    )


def trackio_writer(target: Target) -> RunWriter:
    trackio = import_module("trackio")
    name, off = f"{target.name}-{target.identity}", {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
    run = trackio.init(project=project("TRACKIO"), name=name, config=target.config, resume="allow", **off)
    return RunWriter(
        run,
        lambda step, values: run.log(values, step=step),
        lambda rows: trackio.Table(columns=list(SAMPLE_COLUMNS), data=rows),
    )


def swanlab_writer(target: Target) -> RunWriter:
    swanlab = import_module("swanlab")
    common = {"project": project("SWANLAB"), "name": target.name, "id": target.identity, "config": target.config}
    try:
        run = swanlab.init(**common, resume="allow", log_dir=str(target.folder))
    except (RuntimeError, ValueError) as error:
        raise ConfigError(f"SwanLab must open a run (swanlab login, or SWANLAB_MODE=offline): {error}") from None
    return RunWriter(
        run,
        lambda step, values: run.log(values, step=step),
        lambda rows: [swanlab.Text(json.dumps(dict(zip(SAMPLE_COLUMNS, row, strict=True)))) for row in rows],
    )
