"""What a running job's journal states: its processes, its surviving history, and its recovery from each fault."""

from dataclasses import dataclass, field
from pathlib import Path

from areal_bus.messages import Role
from areal_lab.chaos.recoveries import Recoveries
from areal_lab.chaos.survivors import Survivors
from tools.follow import JournalFollower
from tools.run import Run
from tools.run_status import RunStatus

EVENTS = ("start", "end", "failed", "joined", "member", "term", "admit", "refund", "trajectory", "update", "checkpoint")


@dataclass
class RingWatch:
    """Reads new lines at each `look`. The journal's clock `t` is `time.monotonic` on this machine."""

    folder: Path
    survivors: Survivors = field(default_factory=Survivors)
    recoveries: Recoveries = field(default_factory=Recoveries)
    last_update: float = 0.0  # when the newest update was reported
    has_checkpoint: bool = False

    def __post_init__(self) -> None:
        self.status = RunStatus(Run(self.folder))
        self._follower = JournalFollower(self.status.where, EVENTS)

    def look(self) -> None:
        for line in self._follower.read():
            self.status.take(line)
            self.has_checkpoint = self.has_checkpoint or line["event"] == "checkpoint"
            if line["role"] != Role.HEAD:
                continue
            self.survivors.take(line)
            self.recoveries.take(line)
            if line["event"] == "update":
                self.last_update = line["t"]

    @property
    def version(self) -> int:
        return max(self.survivors.updates, default=0)

    @property
    def is_over(self) -> bool:
        """Whether the head has ended in order: no fault may come any more."""
        return self.status.head.end is not None
