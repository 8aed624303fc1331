"""Failures of user code in one actor: full tracebacks in RUN/logs, a line for people, and an end when nothing works.

The first failure at each place (file and line) is kept and told. Before anything has worked, a second one at the same
place, of another prompt, ends the job: the rest would fail as well.
"""

from collections.abc import Hashable
from pathlib import Path

from loguru import logger

from actors.runtime.user_code import shown
from areal_bus.errors import UserCodeFailed

MOST_PLACES = 100  # kept and told


class Failures:
    """Of one function of the user's. `file` is made with the first failure."""

    def __init__(self, logs: Path, name: str, what: str, *, ends: bool = True) -> None:
        """`name` is the actor's, `what` the setting and its value, for people. `ends`: it cannot have worked before, so
        a second failure may end the job.
        """
        self.file = logs / f"{name}.failures.txt"
        self._name, self._what, self._ends = name, what, ends
        self._places: dict[str, Hashable] = {}  # the group that failed there first
        self._has_worked = False

    def work(self) -> None:
        """It did what it is for, once at least."""
        self._has_worked = True

    def note(self, *, group: Hashable, about: str, place: str, error: str, trace: str) -> None:
        """It failed at `place`. Raises UserCodeFailed when that is the second time and nothing has worked yet.

        `group`: whose failures count as one; `about`: the sample, for people; `error` names the place.
        """
        is_new = place not in self._places and len(self._places) < MOST_PLACES
        first = self._places.setdefault(place, group) if is_new else self._places.get(place, group)
        if is_new:
            self._keep(f"{about}: {error}", trace)
            logger.warning("{}: {} failed: {}; full traceback: {}", self._name, self._what, error, shown(self.file))
        if self._ends and not self._has_worked and first != group:
            raise UserCodeFailed(
                f"{self._what} failed twice at the same place, and has not worked once: {error}; full traceback: "
                f"{shown(self.file)}"
            )

    def _keep(self, title: str, trace: str) -> None:
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with self.file.open("a", encoding="utf-8", errors="replace") as file:
                file.write(f"{title}\n{trace.rstrip()}\n\n")
        except OSError as error:
            logger.warning("{}: no traceback kept: {}", self._name, error)


class Prints:
    """The file that user code's standard output goes to; people are told of it with its first byte."""

    def __init__(self, logs: Path, name: str, what: str) -> None:
        self.file = logs / f"{name}.out.txt"
        self._name, self._what = name, what
        self._is_told = False

    def look(self) -> None:
        """Tell once that there is something."""
        if not self._is_told and self.file.exists() and self.file.stat().st_size:
            self._is_told = True
            logger.info("{}: what {} prints is in {}", self._name, self._what, shown(self.file))
