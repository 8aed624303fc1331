"""The results of a sweep's jobs: read from a finished run, kept as one JSON line each in OUT/results.jsonl."""

import contextlib
import fcntl
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

from areal_bus.core.evaluation import STEP
from areal_bus.errors import ConfigError
from areal_bus.storage.journal_segments import LineFile
from areal_lab.sweep.plan import Job
from tools.run import Line, Run

LAST_SHARE = 0.1  # part of the updates whose mean reward is `reward_last`
MEANS = ("lag_mean", "masked_share", "clip_share", "mismatch_kl", "ess", "entropy", "grad_norm", "length_trained",
         "length_sampled", "n_dropped")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Result:
    """One finished or failed job."""

    digest: str
    cell: dict[str, str]
    seed: int
    error: str = ""
    score: float | None = None  # sweep.metric of the evaluation "after"
    score_se: float | None = None  # its standard error over problems, for avg_at_k
    auc: float | None = None  # mean of the metric over versions, from "before" or the first evaluation to "after"
    reward_last: float | None = None
    n_updates: int = 0
    wall_s: float = 0.0
    means: dict[str, float] | None = None  # over updates


def read_result(job: Job, folder: Path, *, metric: str, wall_s: float) -> Result:
    """The result of a run that ended. Raises ConfigError when it has no score."""
    run = Run(folder)
    updates: list[Line] = []
    evaluations: dict[str, Line] = {}
    for line in run.events("update", "evaluation"):
        if line["event"] == "evaluation":
            evaluations[line["name"]] = line
        else:
            updates.append(line)
    after = evaluations.get("after")
    if after is None or not isinstance(after.get(metric), int | float):
        raise ConfigError(f"missing {metric} of the evaluation after training in {folder}: it is the score of a job")
    last = updates[-max(1, round(len(updates) * LAST_SHARE)) :]
    return Result(
        job.digest,
        dict(job.cell),
        job.seed,
        score=after[metric],
        score_se=after.get("avg_at_k_se") if metric == "avg_at_k" else None,
        auc=area(curve(evaluations.values(), metric)),
        reward_last=fsum(line["reward"] for line in last) / len(last) if last else None,
        n_updates=len(updates),
        wall_s=round(wall_s, 1),
        means={name: mean for name in MEANS if (mean := mean_of(updates, name)) is not None},
    )


def curve(evaluations: Any, metric: str) -> list[tuple[int, float]]:
    """(version, metric) of the evaluations of the main set, by version."""
    found = {}
    for line in evaluations:
        name, value = str(line["name"]), line.get(metric)
        if (name in {"before", "after"} or name.startswith(STEP)) and ":" not in name and value is not None:
            found[int(line["version"])] = float(value)
    return sorted(found.items())


def area(points: list[tuple[int, float]]) -> float | None:
    """Area under the curve (trapezoids) over its width: the metric's mean over versions. None for one point."""
    if len(points) < 2:
        return None
    parts = [(b - a) * (y + z) / 2 for (a, y), (b, z) in pairwise(points)]
    return fsum(parts) / (points[-1][0] - points[0][0])


def mean_of(updates: list[Line], name: str) -> float | None:
    values = [line[name] for line in updates if isinstance(line.get(name), int | float)]
    return fsum(values) / len(values) if values else None


class ResultFile:
    """OUT/results.jsonl. A later line of a job replaces an earlier one."""

    def __init__(self, path: Path) -> None:
        """Creates nothing before `locked` or `add`."""
        self._path = path
        self._file: LineFile | None = None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Raises ConfigError while another process is in this block."""
        self._open()
        with self._path.open("ab") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(
                    f"another sweep runs in {self._path.parent}: wait for its end, or name another folder (--out)"
                ) from None
            yield

    def add(self, result: Result) -> None:
        self._open().append(json.dumps(asdict(result), separators=(",", ":")).encode())

    def read(self) -> dict[str, Result]:
        """Digest -> result. A line that was cut by a kill is left out."""
        return {result.digest: result for result in _results(self._path)} if self._path.exists() else {}

    def _open(self) -> LineFile:
        if self._file is None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = LineFile(self._path)
            except OSError as error:
                raise ConfigError(f"results are kept in {self._path}: {error.strerror}") from None
        return self._file


def _results(path: Path) -> Iterator[Result]:
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found: Mapping[str, Any] = json.loads(line)
            yield Result(**found)
        except (ValueError, TypeError):
            continue
