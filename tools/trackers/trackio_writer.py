"""Writes to Trackio's local database (TRACKIO_DIR); `trackio show` opens it. TRACKIO_SPACE_ID names a Space."""

import os
from collections.abc import Sequence

import trackio

from tools.run import Line
from tools.trackers.protocol import SAMPLE_COLUMNS, Target
from tools.trackers.series import Row


class TrackioWriter:
    """One Trackio run of the project TRACKIO_PROJECT, else `areal-bus`."""

    takes_undo = False
    is_rewritten = False
    takes_samples = True

    def __init__(self, target: Target) -> None:
        self._run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "areal-bus"),
            name=f"{target.name}-{target.identity}",
            config=target.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, rows: Sequence[Row]) -> None:
        for row in rows:
            self._run.log(row.values, step=row.step)

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        data = [[sample.get(name) for name in SAMPLE_COLUMNS] for sample in samples]
        table = trackio.Table(columns=list(SAMPLE_COLUMNS), data=data)
        self._run.log({"samples": table}, step=version)

    def close(self) -> None:
        self._run.finish()  # type: ignore[no-untyped-call]
