"""The protocol of a tracker's writer, and the facts about the run that it receives."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tools.run import Line
from tools.trackers.series import Row

SAMPLE_COLUMNS = ("version", "uid", "sample", "reward", "finish", "prompt", "completion")


@dataclass(frozen=True, slots=True)
class Target:
    """The tracker's run."""

    name: str  # of the run
    folder: Path  # for the tracker's own files; exists
    config: Line  # the run's resolved config
    identity: str  # the same at every start that continues this tracker run
    first_step: int  # rows of earlier steps were written by an earlier start


class Writer(Protocol):
    """Writes rows to one tracker. A crash of it ends the follower, never the job."""

    takes_undo: bool  # whether rows can be removed; else a version that is trained again keeps its first values
    is_rewritten: bool  # whether it writes everything at each start; else it continues after `first_step`
    takes_samples: bool

    def write(self, rows: Sequence[Row]) -> None:
        """Write rows, or hand them to the tracker's own process."""

    def undo(self, version: int) -> None:
        """Remove all rows of later versions. Only with `takes_undo`."""

    def samples(self, version: int, samples: Sequence[Line]) -> None:
        """Write a table with SAMPLE_COLUMNS. Only with `takes_samples`."""

    def close(self) -> None:
        """Finish the tracker's run. It can be continued later."""
