"""The split of ranks, and the training samples at each generator: recounted from the head's lines."""

from collections import Counter

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.clock import Clock
from tools.audit.replay.members import Members
from tools.audit.replay.terms import TermStart
from tools.audit.run_settings import RunSettings


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


class Slots:
    """Slots in force, and the samples that each generator was leased and has not sent."""

    def __init__(self, setup: RunSettings, file: JournalFile) -> None:
        self.setup, self.file = setup, file
        self.in_force: int | None = None  # they do not adapt
        self.n_checked = 0  # leases under fewer slots than all
        self._load: Counter[str] = Counter()
        self._held: dict[int, tuple[str, int, set[int]]] = {}  # uid -> holder, attempt, samples that it has sent
        self._n: dict[int, int] = {}  # uid -> samples of its lease

    def adapt(self, line: Line) -> None:
        """The slots in force change, within what the settings allow."""
        if "slots" not in line:
            return
        slots, least, most = line["slots"], self.setup.slots_min, max(self.setup.slots, default=0)
        if line["before"] != self.in_force:
            self.file.add("I9", f"slots change from those in force: {self.in_force}, not {line['before']}")
        if least is None or not least <= slots <= most:
            self.file.add("I9", f"slots in force are topology.adapt.slots_min = {least} to {most}: {slots}")
        self.in_force = slots

    def lease(self, line: Line) -> None:
        """A group goes to a generator with room for it under the slots in force, or with nothing else to do."""
        uid, holder, n = line["uid"], line["holder"], line["n"]
        self.release(uid)
        load = self._load[holder]
        if self.in_force is not None and self.in_force < min(self.setup.slots, default=0):
            self.n_checked += 1
            if load and load + n > self.in_force:
                text = f"a generator is leased {self.in_force} samples at most, the slots in force: {load} + {n}"
                self.file.add("I9", text, uid=uid)
        self._load[holder] += n
        self._held[uid], self._n[uid] = (holder, line["attempt"], set()), n

    def sampled(self, line: Line) -> None:
        """A sample has left its generator: a `sampled` line, or its score, which may come first."""
        held = self._held.get(line["uid"])
        if held is None or held[1] != line["attempt"] or line["sample"] in held[2]:
            return
        held[2].add(line["sample"])
        self._load[held[0]] -= 1

    def release(self, uid: int) -> None:
        """The lease of a group is over."""
        held = self._held.pop(uid, None)
        if held is not None:
            self._load[held[0]] -= self._n.pop(uid) - len(held[2])

    def lose(self, holder: str) -> None:
        """A generator is gone, and all its leases with it."""
        for uid in [uid for uid, held in self._held.items() if held[0] == holder]:
            self.release(uid)

    def begin_life(self) -> None:
        """Forget all leases: a head starts without any."""
        self._held.clear()
        self._n.clear()
        self._load.clear()

    def go_back(self, beginning: TermStart) -> None:
        """A term restores the slots of its version. Which leases it returns is not in the journal."""
        self.begin_life()
        self.in_force = beginning.slots
