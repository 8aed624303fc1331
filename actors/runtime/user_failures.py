"""Reports failures of user code in one actor: full tracebacks in RUN/logs, one log line, and an early end of the job.

The first failure at each place (file and line) is written and logged. If the code has never succeeded, `MIN_FAILURES`
failures at one place for `MIN_GROUPS` prompts end the job: the others would very likely fail as well.

A crash outside these (`Fault`) is written to RUN/logs/NAME.fault.json for the supervisor. An incarnation that crashes
at the same place as the one before, and made no further progress, is not restarted.
"""

import json
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from loguru import logger

from actors.runtime.user_code import shown
from areal_bus.errors import UserCodeFailed

MAX_PLACES = 100  # places that are written and logged
# A typo fails for every prompt and reaches both within a batch or two. An error that depends on the row, in a tenth of
# the rows, fails for the first four prompts in one start of 10,000 (for the first two in one of 100).
MIN_GROUPS = 4  # prompts
MIN_FAILURES = 8  # samples


@dataclass(slots=True)
class FailuresAtPlace:
    """Failures at one file and line. `groups` is complete up to `MIN_GROUPS`."""

    groups: set[Hashable] = field(default_factory=set)
    n: int = 0

    def count(self, group: Hashable) -> bool:
        """Count a failure. Returns whether there are enough to end the job."""
        self.n += 1
        if len(self.groups) < MIN_GROUPS:
            self.groups.add(group)
        return len(self.groups) >= MIN_GROUPS and self.n >= MIN_FAILURES


class Failures:
    """Failures of one user function. `file` is created with the first failure."""

    def __init__(self, logs: Path, name: str, what: str, *, ends: bool = True) -> None:
        """`name`: the actor. `what`: the setting and its value. `ends`: failures may end the job, because the function
        cannot have succeeded in an earlier incarnation.
        """
        self.file = logs / f"{name}.failures.txt"
        self._name, self._what, self._ends = name, what, ends
        self._places: dict[str, FailuresAtPlace] = {}
        self._has_succeeded = False

    def note_success(self) -> None:
        self._has_succeeded = True

    def note(self, *, group: Hashable, about: str, place: str, error: str, trace: str, counts: bool = True) -> None:
        """Note a failure at `place` (`group`: prompt, `about`: sample). UserCodeFailed: enough `counts`, no success."""
        if place not in self._places:
            if len(self._places) == MAX_PLACES:
                return
            self._places[place] = FailuresAtPlace()
            self._keep(f"{about}: {error}", trace)
            logger.warning("{}: {} failed: {}; full traceback: {}", self._name, self._what, error, shown(self.file))
        if counts and self._places[place].count(group) and self._ends and not self._has_succeeded:
            raise UserCodeFailed(
                f"{self._what} failed for {self._places[place].n} samples of {MIN_GROUPS} prompts or more at the same "
                f"place and has never succeeded: {error}; full traceback: {shown(self.file)}"
            )

    def _keep(self, title: str, trace: str) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{title}\n{trace.rstrip()}\n\n")
        except OSError as error:
            logger.warning("{}: cannot write the traceback: {}", self._name, error)


class Prints:
    """The file that receives the standard output of user code. Its path is logged once it is not empty."""

    def __init__(self, logs: Path, name: str, what: str) -> None:
        self.file = logs / f"{name}.out.txt"
        self._name, self._what = name, what
        self._is_logged = False

    @property
    def run_folder(self) -> Path:
        return self.file.parents[1]

    def log_once(self) -> None:
        """Log the file's path once, when it is not empty."""
        if not self._is_logged and self.file.exists() and self.file.stat().st_size:
            self._is_logged = True
            logger.info("{}: output of {} goes to {}", self._name, self._what, shown(self.file))


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
        file_of(logs, name).write_text(json.dumps(asdict(fault)) + "\n", encoding="utf-8")
    except OSError:  # disk full: the supervisor counts the crash as any other
        return


def read_fault(logs: Path, name: str) -> Fault | None:
    """The crash of the incarnation before; None if there is none."""
    try:
        return Fault(**json.loads(file_of(logs, name).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def file_of(logs: Path, name: str) -> Path:
    return logs / f"{name}.fault.json"
