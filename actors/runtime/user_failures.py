"""Reports failures of user code in one actor: full tracebacks in RUN/logs, one log line, and an early end of the job.

The first failure at each place (file and line) is written and logged. If the code has never succeeded, a second failure
at the same place with another prompt ends the job: all other prompts would fail as well.
"""

from collections.abc import Hashable
from pathlib import Path

from loguru import logger

from actors.runtime.user_code import shown
from areal_bus.errors import UserCodeFailed

MAX_PLACES = 100  # places that are written and logged


class Failures:
    """Failures of one user function. `file` is created with the first failure."""

    def __init__(self, logs: Path, name: str, what: str, *, ends: bool = True) -> None:
        """`name`: the actor. `what`: the setting and its value. `ends`: a second failure may end the job, because the
        function cannot have succeeded in an earlier incarnation.
        """
        self.file = logs / f"{name}.failures.txt"
        self._name, self._what, self._ends = name, what, ends
        self._places: dict[str, Hashable] = {}  # the group that failed there first
        self._has_succeeded = False

    def note_success(self) -> None:
        """Note a success."""
        self._has_succeeded = True

    def note(self, *, group: Hashable, about: str, place: str, error: str, trace: str) -> None:
        """Note a failure at `place`. Raises UserCodeFailed for the second one when nothing has succeeded yet.

        `group`: failures of one group count once. `about`: the sample. `error` names the place.
        """
        is_new = place not in self._places and len(self._places) < MAX_PLACES
        first = self._places.setdefault(place, group) if is_new else self._places.get(place, group)
        if is_new:
            self._keep(f"{about}: {error}", trace)
            logger.warning("{}: {} failed: {}; full traceback: {}", self._name, self._what, error, shown(self.file))
        if self._ends and not self._has_succeeded and first != group:
            raise UserCodeFailed(
                f"{self._what} failed twice at the same place and has never succeeded: {error}; full traceback: "
                f"{shown(self.file)}"
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

    def log_once(self) -> None:
        """Log the file's path once, when it is not empty."""
        if not self._is_logged and self.file.exists() and self.file.stat().st_size:
            self._is_logged = True
            logger.info("{}: output of {} goes to {}", self._name, self._what, shown(self.file))
