"""The alarms of a growing journal."""

import time
from dataclasses import dataclass, field

from tools.alarms.alarm_reader import AlarmReader, Finding
from tools.follow import HOLD_S, JournalFollower
from tools.run import Run
from tools.trackers.series import EVENTS, SeriesReader


@dataclass(slots=True)
class LiveAlarms:
    """Reads on at each `advance`."""

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
