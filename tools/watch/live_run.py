"""The newest state of a run, kept up to date from its growing journal, as one `Frame` for the views."""

import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from areal_bus.foreign_text import printable
from tools.alarms.alarm_reader import AlarmReader
from tools.episodes import facts_of, heading_of, right_or_wrong
from tools.follow import JournalFollower
from tools.run import Line, Run
from tools.run_status import HEAD_EVENTS, RunStatus
from tools.trackers.series import EVENTS as SERIES_EVENTS
from tools.trackers.series import Row, SeriesReader
from tools.trackers.session import newest_samples
from tools.watch.ring_flow import EVENTS as FLOW_EVENTS
from tools.watch.ring_flow import RingFlow
from tools.why import ActorStatus, report_of

CURVES = ("rollout/reward", "rollout/accuracy", "eval/accuracy", "rollout/length", "staleness/lag",
          "staleness/masked_share", "train/kl", "train/entropy", "train/grad_norm", "perf/tokens_per_s")  # fmt: skip
MAX_POINTS = 160  # of a curve in a frame
MAX_TEXT = 2000  # characters of a prompt or a completion in a frame

Points = list[tuple[int, float]]  # (version, value)


@dataclass(frozen=True, slots=True)
class Alarm:
    """An alarm that was raised (docs/alarms.md)."""

    name: str
    since: int  # version
    is_active: bool  # its rule still holds
    seen: str
    advice: str


@dataclass(frozen=True, slots=True)
class Frame:
    """One moment of a run. Fields are plain JSON values."""

    run: str
    wall: float  # seconds since 1970
    state: str  # as of tools.why: alive, stalled, interrupted, dead, ended, failed
    sentence: str
    verdict: str  # of the head, "" without one
    version: int | None
    n_steps: int | None  # of the whole run; None without a config
    left_s: float | None  # until the last step, at the speed so far; None before the second update and after the end
    published: int | None
    term: int
    flow: dict[str, int]  # prompts by stage
    curves: dict[str, Points]  # newest last, at most MAX_POINTS each
    actors: list[ActorStatus]
    samples: list[dict[str, Any]]
    alarms: list[Alarm]  # that were raised, in order

    @property
    def is_running(self) -> bool:
        return self.state in ("alive", "stalled")


@dataclass(slots=True)
class LiveRun:
    """Reads on at each `frame`. Not thread-safe."""

    where: Run
    _journal: JournalFollower = field(init=False)
    _status: RunStatus = field(init=False)
    _flow: RingFlow = field(default_factory=RingFlow)
    _series: SeriesReader = field(default_factory=SeriesReader)
    _alarms: AlarmReader = field(init=False)
    _points: dict[str, Points] = field(default_factory=dict)
    _updates: list[tuple[int, float]] = field(default_factory=list)  # first and last (version, wall) of this start

    def __post_init__(self) -> None:
        self._journal = JournalFollower(self.where, {*SERIES_EVENTS, *FLOW_EVENTS, *HEAD_EVENTS})
        self._status = RunStatus(self.where)
        self._alarms = AlarmReader(self.where)

    def frame(self, now: float | None = None) -> Frame:
        """The state of the run at `now` (wall time). Lines are taken as soon as they are written."""
        now = time.time() if now is None else now
        for line in self._journal.read():
            if line["event"] in HEAD_EVENTS:
                self._status.take(line)
            self._flow.take(line)
            if line["event"] in ("update", "term"):
                self._time(line)
            if line["event"] == "spans":
                self._alarms.count(line)
            for item in self._series.take(line):
                self._alarms.take(item)
                self._add(item.values.items(), item.step) if isinstance(item, Row) else self._cut(item.version)
        report = report_of(self._status, now)
        steps = self.where.config().get("run", {}).get("total_train_steps")
        is_running = report.state in ("alive", "stalled")
        return Frame(
            run=str(self.where.folder),
            wall=now,
            state=report.state,
            sentence=report.sentence,
            verdict=report.verdict,
            version=report.version,
            n_steps=steps if isinstance(steps, int) else None,
            left_s=self._left_s(steps) if is_running and isinstance(steps, int) else None,
            published=report.published,
            term=report.term,
            flow={str(stage): n for stage, n in self._flow.counts().items()},
            curves={name: thinned(self._points[name]) for name in CURVES if name in self._points},
            actors=report.actors,
            samples=[_short(sample) for sample in newest_samples(self.where)],
            alarms=[Alarm(one.name, one.since, one.is_active, one.seen, one.advice) for one in self._alarms.findings()],
        )

    def _time(self, line: Line) -> None:
        """A term begins to measure anew: versions may go back, and a pause between two starts is no work."""
        at = (int(line["version"]), float(line["wall"]))
        self._updates = [] if line["event"] == "term" else [*self._updates[:1], at]

    def _left_s(self, n_steps: int) -> float | None:
        """Seconds for the steps that are left, each as long as those so far."""
        if len(self._updates) < 2 or self._updates[1][0] <= self._updates[0][0]:
            return None
        (first, began), (last, now) = self._updates
        return (now - began) / (last - first) * max(n_steps - last, 0)

    def _add(self, values: Iterable[tuple[str, float]], version: int) -> None:
        for name, value in values:
            if name in CURVES and math.isfinite(value):
                points = self._points.setdefault(name, [])
                if not points or points[-1][0] < version:
                    points.append((version, value))

    def _cut(self, version: int) -> None:
        kept = {name: [one for one in points if one[0] <= version] for name, points in self._points.items()}
        self._points = {name: points for name, points in kept.items() if points}


def thinned(points: Sequence[tuple[int, float]], most: int = MAX_POINTS) -> Points:
    """At most `most` points: the mean of each of so many equal parts, at the last version of the part."""
    if len(points) <= most:
        return list(points)
    edges = [round(i * len(points) / most) for i in range(most + 1)]
    parts = [points[begin:end] for begin, end in pairwise(edges)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]


def _short(sample: dict[str, Any]) -> dict[str, Any]:
    texts = {key: printable(str(sample.get(key, ""))[:MAX_TEXT]) for key in ("prompt", "completion")}
    told = {"heading": heading_of(sample), "mark": right_or_wrong(sample), "facts": "; ".join(facts_of(sample))}
    return {key: sample.get(key) for key in ("version", "uid", "sample")} | told | texts
