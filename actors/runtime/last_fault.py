"""The last crash in user code: an actor writes place and progress to RUN/logs/NAME.fault.json for its supervisor.

An incarnation that crashes at the same place as the one before, and made no further progress, is not restarted.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """The crash of one incarnation."""

    place: str  # FILE:LINE
    reached: int  # the version that the learner had

    def recurs(self, before: "Fault | None") -> bool:
        """Whether the incarnation before crashed at the same place and this one made no progress since."""
        return before is not None and self.place == before.place and self.reached <= before.reached


def keep_fault(logs: Path, name: str, fault: Fault) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file_of(logs, name).write_text(json.dumps(asdict(fault)) + "\n")
    except OSError:  # disk full: the supervisor counts the crash as any other
        return


def read_fault(logs: Path, name: str) -> Fault | None:
    """The crash of the incarnation before; None if there is none."""
    try:
        return Fault(**json.loads(file_of(logs, name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.fault.json"
