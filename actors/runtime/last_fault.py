"""Where one life of an actor ended in the user's code, and how far it had come: written by it, read by its supervisor.

RUN/logs/NAME.fault.json. A life that ends at the place of the one before, and no further, is the last one.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Fault:
    """Of one life."""

    place: str  # FILE:LINE
    reached: int  # the version that the learner had

    def recurs(self, before: "Fault | None") -> bool:
        """The life before ended here, too, and this one came no further."""
        return before is not None and self.place == before.place and self.reached <= before.reached


def keep_fault(logs: Path, name: str, fault: Fault) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
        file_of(logs, name).write_text(json.dumps(asdict(fault)) + "\n")
    except OSError:  # no room: the supervisor counts its crashes as any others
        return


def read_fault(logs: Path, name: str) -> Fault | None:
    """None where that life left none."""
    try:
        return Fault(**json.loads(file_of(logs, name).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def file_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.fault.json"
