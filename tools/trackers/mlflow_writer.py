"""Writes to MLflow: the server that MLFLOW_TRACKING_URI names, else files in the tracker's folder."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException
from mlflow.tracking import MlflowClient

from areal_bus.errors import ConfigError
from tools.run import Line
from tools.trackers.protocol import SAMPLE_COLUMNS, Target
from tools.trackers.series import Row

FILES = "MLFLOW_ALLOW_FILE_STORE"  # MLflow refuses a folder without it
IDENTITY = "areal_bus.identity"  # tag of the run that a later start continues
MAX_METRICS, MAX_PARAMS, MAX_VALUE = 1000, 100, 500  # of one request, and of a parameter's text


class MlflowWriter:
    """One MLflow run of the experiment MLFLOW_EXPERIMENT_NAME, else `areal-bus`."""

    takes_undo = False
    is_rewritten = False
    takes_samples = True

    def __init__(self, target: Target) -> None:
        os.environ.setdefault(FILES, "true")
        try:
            self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or target.folder.resolve().as_uri())
            self._run = self._open(target).info.run_id
        except MlflowException as error:
            raise ConfigError(f"MLflow must open a run (MLFLOW_TRACKING_URI): {error}") from None

    def _open(self, target: Target) -> Run:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "areal-bus")
        known = self._client.get_experiment_by_name(name)
        experiment = known.experiment_id if known else self._client.create_experiment(name)
        tags = {IDENTITY: target.identity}
        if found := self._client.search_runs([experiment], f"tags.`{IDENTITY}` = '{target.identity}'"):
            self._client.set_terminated(found[0].info.run_id, "RUNNING")
            return found[0]
        run = self._client.create_run(experiment, run_name=target.name, tags=tags)
        params = [Param(key, str(value)[:MAX_VALUE]) for key, value in flat(target.config)]
        for begin in range(0, len(params), MAX_PARAMS):
            self._client.log_batch(run.info.run_id, params=params[begin : begin + MAX_PARAMS])
        return run

    def write(self, rows: Sequence[Row]) -> None:
        metrics = [
            Metric(name, value, int(1000 * row.wall), row.step) for row in rows for name, value in row.values.items()
        ]
        for begin in range(0, len(metrics), MAX_METRICS):
            self._client.log_batch(self._run, metrics=metrics[begin : begin + MAX_METRICS])

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        lines = [json.dumps({name: sample.get(name) for name in SAMPLE_COLUMNS}) + "\n" for sample in samples]
        self._client.log_text(self._run, "".join(lines), f"samples/{version:06}.jsonl")

    def close(self) -> None:
        self._client.set_terminated(self._run)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The settings by their keys, as in actor.lr."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
