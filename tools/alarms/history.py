"""What the alarms compare: figures of each update, evaluations, and how long actors waited. Pure: no I/O."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from areal_bus.core.parts.collapse import CollapseForecast
from tools.run import Line, is_number
from tools.trackers.series import Row

Points = list[tuple[int, float]]  # (version, value)
SERIES = (
    "rollout/reward",
    "rollout/reward_std",
    "rollout/length",
    "rollout/accuracy",
    "rollout/completed_accuracy",
    "rollout/zero_advantage_share",
    "staleness/masked_share",
    "train/entropy",
    "train/kl",
    "train/ess",
)
FORECAST = {  # figure of a step -> series
    "ess": "train/ess",
    "mismatch_kl": "train/kl",
    "clip_share": "train/clip_share",
    "entropy": "train/entropy",
    "lag_mean": "staleness/lag",
    "lr": "train/lr",
}
REPEATED = "samples/repeated_share"
WAITS = {"generator": ("idle:prompt", "idle:weights"), "learner": ("wait_batch",)}  # labels of an actor that starves
LEAST_WAIT_S = 2.0  # of labelled time, before a share of it is judged


@dataclass(frozen=True, slots=True)
class Window:
    """Some values in a row."""

    first: int  # version
    last: int
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return fmean(self.values)

    @property
    def variance(self) -> float:
        """The variance of the mean."""
        return stdev(self.values) ** 2 / len(self.values)

    def __str__(self) -> str:
        return f"versions {self.first} to {self.last}"


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A held-out result of a version."""

    version: int
    problems: str  # name of the set; "" for the first
    metric: str  # accuracy, or reward where the task judges no answer
    value: float
    variance: float  # of the value over problems; 0 if not known


@dataclass(slots=True)
class Waiting:
    """Seconds of actors since the update before."""

    waited: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))  # by actor, no incarnation
    total: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, line: Line) -> None:
        """Count a `spans` line of a generator or a learner."""
        labels = WAITS.get(str(line.get("role")))
        if labels is None:
            return
        name = f"{line['role']}-{line.get('rank')}"
        for key, seconds in line.items():
            if key.startswith("s_") and is_number(seconds):
                self.total[name] += seconds
        for label in labels:
            seconds = line.get(f"w_{label}" if ":" in label else f"s_{label}", 0.0)
            self.waited[name] += float(seconds) if is_number(seconds) else 0.0


@dataclass(slots=True)
class History:
    """The surviving history of a run. Each list is in the order of versions."""

    version: int = 0
    points: dict[str, Points] = field(default_factory=dict)  # by series
    templates: list[tuple[int, Mapping[str, float]]] = field(default_factory=list)  # version, shares
    waits: list[tuple[int, Waiting]] = field(default_factory=list)
    evaluations: list[Evaluated] = field(default_factory=list)
    signs: list[str] = field(default_factory=list)  # of a collapse, in the newest update
    _forecast: CollapseForecast = field(default_factory=CollapseForecast)

    def add(self, row: Row) -> None:
        """Add the row of an update."""
        self.version = row.step
        for name in SERIES:
            self.add_value(name, row.values.get(name, math.nan))
        values = {figure: row.values[name] for figure, name in FORECAST.items() if name in row.values}
        self.signs = self._forecast.signs(values)

    def add_value(self, name: str, value: float) -> None:
        """Add a value of the newest version, unless it is not finite."""
        if math.isfinite(value):
            self.points.setdefault(name, []).append((self.version, value))

    def evaluate(self, row: Row) -> None:
        problems = row.key.partition(":")[2]
        prefix = f"eval/{problems}/" if problems else "eval/"
        for metric in ("accuracy", "reward"):
            if math.isfinite(value := row.values.get(prefix + metric, math.nan)):
                error = row.values.get(f"{prefix}avg_at_k_se")
                n = row.values.get(f"{prefix}n", 0.0)
                if metric == "accuracy":
                    variance = max(value * (1 - value), 0.0) / max(n, 1.0) if error is None else error**2
                else:
                    variance = 0.0
                self.evaluations.append(Evaluated(row.step, problems, metric, value, variance))
                return

    def go_back(self, version: int) -> None:
        """Remove what is later than a version."""
        self.version = min(self.version, version)
        self.signs, self._forecast = [], CollapseForecast(self._forecast.first)
        self.points = {name: [p for p in points if p[0] <= version] for name, points in self.points.items()}
        self.templates = [one for one in self.templates if one[0] <= version]
        self.waits = [one for one in self.waits if one[0] <= version]
        self.evaluations = [one for one in self.evaluations if one.version <= version]

    def last(self, name: str, n: int) -> Window | None:
        """The last n values of a series; None before there are as many."""
        points = self.points.get(name, [])
        return window(points[-n:]) if len(points) >= n else None

    def pair(self, name: str, n: int, horizon: int) -> tuple[Window, Window] | None:
        """The window that ended `horizon` values before, or the first one, and the last one; None if they overlap."""
        points = self.points.get(name, [])
        if len(points) < 2 * n:
            return None
        end = max(len(points) - horizon, n)
        return window(points[end - n : end]), window(points[-n:])

    def until(self, name: str, version: int, n: int) -> Window | None:
        """The n values up to a version; the first n for an earlier one."""
        points = self.points.get(name, [])
        end = max(sum(at <= version for at, _ in points), n)
        return window(points[end - n : end]) if len(points) >= n else None

    def waited_share(self, role: str, n: int) -> dict[str, float]:
        """Actor -> the share of its time that it waited in the last n updates; of those with enough labelled time."""
        recent = [waiting for _, waiting in self.waits[-n:]] if len(self.waits) >= n else []
        waited = summed(waiting.waited for waiting in recent)
        totals = {name: s for name, s in summed(waiting.total for waiting in recent).items() if s >= LEAST_WAIT_S}
        return {name: waited[name] / s for name, s in totals.items() if name.startswith(f"{role}-")}


def window(points: Sequence[tuple[int, float]]) -> Window:
    """The values of points, of which there is at least one."""
    return Window(points[0][0], points[-1][0], [value for _, value in points])


def summed(each: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Name -> the sum of its values."""
    total: defaultdict[str, float] = defaultdict(float)
    for values in each:
        for name, value in values.items():
            total[name] += value
    return dict(total)
