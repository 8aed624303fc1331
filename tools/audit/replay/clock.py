"""Recounts the gate from the head's lines: u, v, w and the credits (I1, I6)."""

from collections import deque

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.terms import TermStart
from tools.audit.run_settings import RunSettings

PUSH_SLACK_S = 10.0  # a head that is busy looks at its deadlines late


class Clock:
    """Times without seconds in which the head did not run. After a finding it continues from the journal's values."""

    def __init__(self, setup: RunSettings, file: JournalFile) -> None:
        self.setup, self.file = setup, file
        self.u = self.v = self.w = 0
        self.live = self.in_training = 0
        self.most = 0  # live + in training at an admission
        self.n_admitted = self.n_published = self.n_updates = 0  # in all terms
        self._n_uids = 0
        self._first_uids: dict[int, int] = {0: 0}  # version -> next uid when it was made
        self._last_uids: dict[int, int] = {}  # version -> next uid when the batch after it was taken
        self._taken: deque[tuple[int, int]] = deque()  # batch, its prompts
        self._pushes: dict[int, tuple[int, float]] = {}  # version -> (push, begun at) of regular ones in flight

    @property
    def moment(self) -> int:
        """A count that grows with each batch and each update: 2 V from update V until batch V is taken."""
        return self.u + self.w

    def admit(self, line: Line) -> None:
        """One more prompt: the backlog stays within (eta + 1) * B, and the head's counts equal ours."""
        self.live += 1
        self.n_admitted += 1
        self._agree(line)
        uid = line["uid"]
        self._n_uids = uid + 1
        for name, counted in (("live", self.live), ("in_training", self.in_training)):
            if line[name] != counted:
                rule = f"{name} is what admissions, batches, refunds and publishes add up to"
                self.file.add("I1", f"{rule}: {counted}, not {line[name]}", uid=uid)
        backlog = max(self.live + self.in_training, line["live"] + line["in_training"])
        self.most = max(self.most, backlog)
        limit = self.setup.limit
        if limit is not None and backlog > limit:
            self.file.add("I1", f"live + in training <= (eta + 1) * B = {limit}: {backlog}", uid=uid)
        self.live, self.in_training = line["live"], line["in_training"]

    def refund(self) -> None:
        self.live -= 1

    def take(self, line: Line) -> None:
        """Batch w is taken at u = w and has at most B prompts."""
        n, step = line["n_groups"], line["step"]
        if not step == line["clock"] == self.w == self.u:
            now = f"step {step} at clock {line['clock']}, w {self.w}, u {self.u}"
            self.file.add("I6", f"batch w is taken when update w is next: {now}", step=step)
        self._agree(line, ("u", "v"))
        if self.setup.batch_size is not None and n > self.setup.batch_size:
            self.file.add("I8", f"a batch has at most B = {self.setup.batch_size} groups: {n}", step=step)
        self.live -= n
        self.in_training += n
        self._taken.append((step, n))
        self._last_uids[step] = self._n_uids
        self.w = step + 1

    def update(self, line: Line) -> None:
        version = line["version"]
        self.n_updates += 1
        if not version == line["u"] == self.u + 1 == self.w:
            text = f"an update makes version u + 1, of the batch taken: {version} (u {self.u}, w {self.w})"
            self.file.add("I6", text, version=version)
        self.u = version
        self._first_uids[version] = self._n_uids

    def outlive(self, version: int) -> bool:
        """Whether a surviving learner made this version from its batch while there was no head."""
        is_unheard = version == self.u + 1 == self.w
        if is_unheard:
            self.n_updates += 1
            self.u = version
            self._first_uids[version] = self._n_uids
        return is_unheard

    def push(self, line: Line) -> None:
        version, is_late = line["version"], line["catch_up"]
        if version != self.u and not (is_late and version == self.v):
            text = f"a push brings u, a catch-up push v: {version} (u {self.u}, v {self.v})"
            self.file.add("I6", text, push=line["push"], version=version)
        if not is_late and version == self.v:
            self.file.add("I6", f"a push to all brings a version above v = {self.v}: {version}", push=line["push"])
        if not is_late:
            self._pushes[version] = (line["push"], line["t"] - self.file.still_s)

    def publish(self, line: Line) -> None:
        """v grows, to u at most. The credits of the published batches return."""
        version = line["version"]
        self.n_published += 1
        if not self.v < version <= self.u or line["v"] != version:
            text = f"v grows and never passes u: {version} after {self.v}, u {self.u}"
            self.file.add("I6", text, version=version)
        self.v = version
        while self._taken and self._taken[0][0] < version:
            self.in_training -= self._taken.popleft()[1]
        began = self._pushes.pop(version, None)
        if began is not None:
            self._in_time(*began, line["t"] - self.file.still_s, version)

    def go_back(self, beginning: TermStart, *, is_same_head: bool) -> int:
        """A term begins: u = v = w = V, and nothing is in training. Returns how many updates are undone."""
        version, next_uid = beginning.version, beginning.next_uid
        n_undone = max(0, self.u - version)
        if version not in self._first_uids:
            self.file.add("I6", f"a term begins at a version that was made: {version}, u is {self.u}", version=version)
            self._first_uids[version] = next_uid
        else:
            low, high = self._first_uids[version], self._last_uids.get(version, self._n_uids)
            rule = f"next_uid is what it was between update {version} and batch {version}"
            if beginning.lives_on and version:
                low = self._last_uids.get(version - 1, low)
                rule = f"next_uid is what it was between batches {version - 1} and {version}"
            if beginning.restored and is_same_head:
                low = high = self._n_uids
                rule = "next_uid is what it was: the copy of a learner undoes no admission"
            if not low <= next_uid <= high:
                self.file.add("I3", f"{rule}: {low}..{high}, not {next_uid}", version=version)
            self._first_uids[version] = min(next_uid, self._first_uids[version])
        self.u = self.v = self.w = version
        self.live, self.in_training = len(beginning.open), 0
        limit = self.setup.limit
        if limit is not None and self.live > limit:
            self.file.add("I1", f"live + in training <= (eta + 1) * B = {limit}: {self.live} as a term begins")
        self._n_uids = next_uid
        self._first_uids = {v: n for v, n in self._first_uids.items() if v <= version}  # a term may come back to it
        self._last_uids = {v: n for v, n in self._last_uids.items() if v < version}
        self._taken.clear()
        self._pushes.clear()
        return n_undone

    def forget_pushes(self) -> None:
        """The head that began them has died."""
        self._pushes.clear()

    def close(self, t: float) -> None:
        """At the last line of an incarnation: a push in flight is within its deadline."""
        for version, (push, began) in self._pushes.items():
            self._in_time(push, began, t - self.file.still_s, version)

    def _in_time(self, push: int, began: float, now: float, version: int) -> None:
        timeout_s = self.setup.push_timeout_s
        if timeout_s is not None and now - began > timeout_s + PUSH_SLACK_S:
            text = f"a push is over by weights.timeout_s = {timeout_s:g}: {now - began:.1f} s"
            self.file.add("I11", text, push=push, version=version)

    def _agree(self, line: Line, names: tuple[str, ...] = ("u", "v", "w")) -> None:
        for name in names:
            mine = getattr(self, name)
            if line[name] != mine:
                self.file.add("I6", f"{name} is what the lines before say: {mine}, not {line[name]}")
                setattr(self, name, line[name])
