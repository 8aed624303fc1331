"""The members and the split of ranks according to the head's lines, and the version that each generator holds (I7)."""

import re

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.clock import Clock

GENERATOR = "generator-"
STATES = ("joining", "stale", "healthy", "dead", "left")
FOR_GOOD = "evicted for good"
_HOLDS = re.compile(r"holds version (\d+)")


class Members:
    """State and version of each member by name."""

    def __init__(self, file: JournalFile) -> None:
        self.file = file
        self.state: dict[str, str] = {}
        self.gone: set[str] = set()  # actors that this head evicted for good
        self.version: dict[str, int] = {}  # of generators that completed a push since they were last dead

    def join(self, line: Line) -> list[str]:
        """A member joins. Returns its older incarnations, which end, and its own name if it joins again."""
        name = line["name"]
        if _place(name) in self.gone:
            self.file.add("I6", f"{name} joins after it was evicted for good")
        older = [known for known in self.state if _place(known) == _place(name)]
        for known in older:
            self._forget(known)
        self.state[name] = "joining"
        return older

    def begin_term(self) -> None:
        """Every generator waits for a push of the new term."""
        self.version.clear()

    def begin_life(self) -> None:
        self.state.clear()
        self.version.clear()
        self.gone.clear()  # it may be of another start, with all generators

    def change(self, line: Line) -> str | None:
        """A change of state. Returns the name if the member is dead."""
        name, state = line["name"], line["state"]
        if name not in self.state:
            self.file.add("I6", f"only who joined is a member: {name} did not")
        self.state[name] = state
        if state not in STATES:
            self.file.add("I6", f"a member's state is one of {', '.join(STATES)}: {state!r}")
        if state == "stale" and not name.startswith(GENERATOR):
            self.file.add("I6", f"only a generator holds weights that become stale: {name}")
        version = held_by(line)
        holds = version if version is not None else self.version.get(name)
        if name.startswith(GENERATOR) and state == "healthy" and holds is None:
            self.file.add("I6", f"a generator is healthy when it holds a version: {name} holds none")
        if version is not None and state != "healthy":
            self.file.add("I6", f"a generator that completed a push is healthy: {name} is {state}")
        if version is not None:
            self.version[name] = version
        if line["why"].startswith(FOR_GOOD):
            self.gone.add(_place(name))
        if state in ("dead", "left"):
            self.version.pop(name, None)
            return str(name)
        return None

    @property
    def root(self) -> str:
        """Learner 0; "" when it has not joined."""
        return next((name for name in self.state if name.startswith("learner-0.")), "")

    def there(self) -> list[str]:
        """Generators that can be pushed to."""
        return [name for name, s in self.state.items() if name.startswith(GENERATOR) and s in ("healthy", "stale")]

    def stale(self, v: int) -> list[str]:
        """Generators without version v. A term and a publication make generators stale without a line."""
        return [name for name in self.there() if self.state[name] == "stale" or self.version.get(name, -1) < v]

    def feed(self, line: Line, v: int, *, is_first: bool) -> int | None:
        """A lease: its holder has the published version of this term (I7). Returns the version that it holds."""
        name, uid = line["holder"], line["uid"]
        held = self.version.get(name)
        if held is None or held < v:
            text = f"a generator that does not hold v = {v} gets no work: {name} holds {held}"
            self.file.add("I7", text, uid=uid)
        elif is_first and line["born"] != held:
            self.file.add("I7", f"born is the version its generator holds: {held}, not {line['born']}", uid=uid)
        return held

    def _forget(self, name: str) -> None:
        self.state.pop(name, None)
        self.version.pop(name, None)


def held_by(line: Line) -> int | None:
    """The version of the push that this member has completed; None for another line."""
    version: int | None = line.get("version")
    if version is None and (found := _HOLDS.fullmatch(line["why"])):
        version = int(found[1])
    return version


def _place(name: str) -> str:
    """Role and rank: generator-0 of generator-0.1."""
    return name.rpartition(".")[0]


class Splits:
    """The newest split. A run without [topology.adapt] has no such lines, and nothing is checked."""

    def __init__(self, file: JournalFile, clock: Clock, members: Members) -> None:
        self.file, self.clock, self.members = file, clock, members
        self._newest: int | None = None  # number, of all incarnations of the head
        self._number: int | None = None  # of this incarnation; None: its split is fixed
        self._learners = self._generators = self._most = 0

    def begin_life(self) -> None:
        """A new head says with which split it starts; with a fixed one the numbers begin anew."""
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
