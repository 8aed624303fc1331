"""The split of ranks: recounted from the head's lines."""

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.clock import Clock
from tools.audit.replay.members import Members


class Splits:
    """The newest split. A run without [topology.adapt] has no such lines, and nothing is checked."""

    def __init__(self, file: JournalFile, clock: Clock, members: Members) -> None:
        self.file, self.clock, self.members = file, clock, members
        self._newest: int | None = None  # number, of all incarnations of the head
        self._number: int | None = None  # of this incarnation; None: its split is fixed
        self._learners = self._generators = self._most = 0

    def begin_life(self) -> None:
        """A new head says with which split it starts, if it may change. After a start whose split is fixed, the numbers
        begin anew.
        """
        if self._number is None:
            self._newest = None
        self._number = None

    def begin(self, line: Line) -> None:
        """The head starts with a split, or has changed it."""
        number, is_change = line["split"], line["why"] == "change"
        if self._newest is not None:
            rule = "splits are numbered in order, and a head starts with the newest on disk"
            if number < self._newest + is_change or (is_change and number > self._newest + 1):
                self.file.add("I6", f"{rule}: {number} follows {self._newest}", split=number)
        if is_change and not line["version"] == self.clock.u == self.clock.w:
            text = f"the split changes between two updates: at version {line['version']}, u {self.clock.u}, "
            self.file.add("I6", f"{text}w {self.clock.w}", split=number)
        self._newest = self._number = number
        self._learners = line["learners"]
        self._generators, self._most = line["generators"], line["most_generators"]

    def join(self, line: Line) -> None:
        self._check_place(line["name"], "a member")

    def lease(self, line: Line) -> None:
        self._check_place(line["holder"], "a holder of prompts")

    def batch(self, line: Line) -> None:
        """All learner ranks of the split train it."""
        states = self.members.state.items()
        n = sum(name.startswith("learner-") and state == "healthy" for name, state in states)
        if self._number is not None and n != self._learners:
            text = f"a batch goes to all learner ranks: {n} of {self._learners} of split {self._number} are there"
            self.file.add("I6", text, step=line["step"])

    def _check_place(self, name: str, what: str) -> None:
        role, _, rest = name.partition("-")
        index = int(rest.partition(".")[0])
        is_out = role == "learner" and index >= self._learners
        is_out |= role == "generator" and self._generators <= index < self._most
        if self._number is not None and is_out:
            has = f"split {self._number} has {self._learners} learner(s) and {self._generators} generator(s)"
            self.file.add("I6", f"{what} has a place in the split: {name} has none, {has}")
