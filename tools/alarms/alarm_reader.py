"""Applies the rules to each update of a run, and keeps what was raised, with samples to read."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from heapq import nlargest

from pydantic import ValidationError

from areal_bus.config.watch import WatchConfig
from areal_bus.errors import ConfigError
from tools.alarms.history import REPEATED, History, Waiting
from tools.alarms.rules import RULES, Reading, Rule
from tools.alarms.step_samples import SampleReader, StepSamples
from tools.follow import HOLD_S, JournalFollower
from tools.run import Line, Run
from tools.trackers.series import EVENTS, UPDATE, Row, SeriesReader, Undone

MOST_SAMPLES = 10
MOST_TEMPLATES = 20  # of a step; others are rare


@dataclass(frozen=True, slots=True)
class Finding:
    """One alarm that was raised. Fields are plain JSON values."""

    name: str
    rule: str  # in one line
    since: int  # version at which it was raised first
    last: int  # newest version at which the rule holds
    is_active: bool  # the rule holds at the newest version
    value: float  # when it was raised
    limit: float
    seen: str  # what was seen then
    advice: str
    samples: list[Line] = field(default_factory=list)  # to read, as in samples.jsonl; of the updates before `since`


class AlarmReader:
    """Give it the `spans` lines and the rows of a SeriesReader, in their order."""

    def __init__(self, where: Run, watch: WatchConfig | None = None) -> None:
        """`watch`: thresholds, else those of the run. Raises ConfigError when the run's are invalid."""
        self.watch = settings_of(where) if watch is None else watch
        self._rules = [rule for rule in RULES if rule.name not in self.watch.off]
        self._history = History()
        self._waiting: Waiting | None = None  # since the newest update; None before the first
        self._samples = SampleReader(where)
        self._recent: deque[StepSamples] = deque(maxlen=self.watch.window)
        self._raised: dict[str, Finding] = {}

    @property
    def version(self) -> int:
        return self._history.version

    def count(self, line: Line) -> None:
        """Take a `spans` line. Those before the first update are of loading."""
        if self._waiting is not None:
            self._waiting.add(line)

    def take(self, item: Row | Undone) -> list[Finding]:
        """Take a row; returns the alarms that are raised for the first time."""
        if isinstance(item, Undone):
            self._go_back(item.version)
            return []
        if item.key != UPDATE:
            self._history.evaluate(item)
        else:
            self._update(item)
        return self._check()

    def findings(self) -> list[Finding]:
        """All alarms of the surviving history, in the order in which they were raised."""
        return sorted(self._raised.values(), key=lambda finding: finding.since)

    def unseen(self) -> dict[str, str]:
        """Rule -> what the journal does not have, of rules that could not be checked."""
        return {rule.name: rule.needs for rule in self._rules if not rule.is_seen(self._history)}

    def _update(self, row: Row) -> None:
        history = self._history
        history.add(row)
        if self._waiting is not None:
            history.waits.append((row.step, self._waiting))
        self._waiting = Waiting()
        block = self._samples.block(row.step - 1)
        if block is None:
            return
        self._recent.append(block)
        history.add_value(REPEATED, block.repeated)
        if templates := block.templates():
            most = nlargest(MOST_TEMPLATES, templates.items(), key=lambda one: one[1])
            history.templates.append((row.step, dict(most)))

    def _check(self) -> list[Finding]:
        version, new = self._history.version, []
        for rule in self._rules:
            reading, known = rule.check(self._history, self.watch), self._raised.get(rule.name)
            if reading is None:
                if known is not None:
                    self._raised[rule.name] = replace(known, is_active=False)
            elif known is None:
                new.append(self._finding(rule, reading))
                self._raised[rule.name] = new[-1]
            else:
                self._raised[rule.name] = replace(known, last=version, is_active=True)
        return new

    def _finding(self, rule: Rule, reading: Reading) -> Finding:
        version = self._history.version
        return Finding(
            name=rule.name,
            rule=rule.sentence.format(**self.watch.model_dump()),
            since=version,
            last=version,
            is_active=True,
            value=reading.value,
            limit=reading.limit,
            seen=reading.seen,
            advice=rule.advice,
            samples=chosen((sample for block in reversed(self._recent) for sample in block.kept), rule.rank),
        )

    def _go_back(self, version: int) -> None:
        self._history.go_back(version)
        self._samples.go_back()
        self._waiting = None
        kept = [block for block in self._recent if block.step < version]
        self._recent = deque(kept, maxlen=self.watch.window)
        self._raised = {
            name: replace(finding, last=min(finding.last, version))
            for name, finding in self._raised.items()
            if finding.since <= version
        }


def chosen(samples: Iterable[Line], rank: Callable[[Line], float]) -> list[Line]:
    """The samples to read: the highest ranks, of as many prompts as there are."""
    ordered = sorted(samples, key=rank, reverse=True)
    firsts: dict[object, Line] = {}
    for sample in ordered:
        firsts.setdefault(sample["uid"], sample)
    first = list(firsts.values())[:MOST_SAMPLES]
    others = [sample for sample in ordered if not any(sample is one for one in first)]
    return [*first, *others[: MOST_SAMPLES - len(first)]]


def settings_of(where: Run) -> WatchConfig:
    """The thresholds of a run; the defaults for a run of an older version."""
    given = where.config().get("watch", {})
    try:
        return WatchConfig.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, ("watch", *first["loc"])))
        raise ConfigError(f"config.json of {where.folder} must hold valid settings: {key}: {first['msg']}") from None


def read(where: Run, watch: WatchConfig | None = None) -> AlarmReader:
    """The alarms of the journal as it is now."""
    reader, series = AlarmReader(where, watch), SeriesReader()
    for line in JournalFollower(where, EVENTS).read():
        if line["event"] == "spans":
            reader.count(line)
        for item in series.take(line):
            reader.take(item)
    return reader


def findings(where: Run) -> list[Finding]:
    """All alarms that a run has raised, with the thresholds of its config."""
    return read(where).findings()


@dataclass(slots=True)
class LiveAlarms:
    """The alarms of a growing journal. Each `advance` reads its new lines."""

    where: Run
    reader: AlarmReader = field(init=False)
    _journal: JournalFollower = field(init=False)
    _series: SeriesReader = field(default_factory=SeriesReader)

    def __post_init__(self) -> None:
        self.reader = AlarmReader(self.where)
        self._journal = JournalFollower(self.where, EVENTS)

    def advance(self, until: float | None = None) -> list[Finding]:
        """Alarms that were raised since the last call, by lines with a wall time up to `until` (a moment before now).

        An alarm whose versions were undone and that is raised again is new again.
        """
        new = []
        for line in self._journal.read(time.time() - HOLD_S if until is None else until):
            if line["event"] == "spans":
                self.reader.count(line)
            for item in self._series.take(line):
                new += self.reader.take(item)
        return new
