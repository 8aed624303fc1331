"""The gate, counted once more from the head's lines: u, v, w and the credits (I1, I6); knows no prompt by name."""

from collections import deque

from tools.audit.reading import File, Line
from tools.audit.setup import Setup

PUSH_SLACK_S = 10.0  # a head that is busy looks at its deadlines late


class Clock:
    """After a finding it goes on from what the journal says, so that one slip is one finding."""

    def __init__(self, setup: Setup, file: File) -> None:
        self.setup, self.file = setup, file
        self.u = self.v = self.w = 0
        self.live = self.in_training = 0
        self.most = 0  # live + in training at an admission
        self.n_admitted = self.n_published = self.n_updates = 0
        self._taken: deque[tuple[int, int]] = deque()  # batch, its prompts
        self._pushes: dict[int, tuple[int, float]] = {}  # version -> (push, begun at) of regular pushes in flight

    def admit(self, line: Line) -> None:
        """One prompt more: the backlog keeps within (eta + 1) * B, and the head's own counts are ours."""
        self.live += 1
        self.n_admitted += 1
        self._agree(line)
        uid = line["uid"]
        for name, counted in (("live", self.live), ("in_training", self.in_training)):
            if line[name] != counted:
                text = (
                    f"{name} is what admissions, batches, refunds and publishes add up to: {counted}, not {line[name]}"
                )
                self.file.add("I1", text, uid=uid)
        backlog = max(self.live + self.in_training, line["live"] + line["in_training"])
        self.most = max(self.most, backlog)
        limit = self.setup.limit
        if limit is not None and backlog > limit:
            self.file.add("I1", f"live + in training <= (eta + 1) * B = {limit}: {backlog}", uid=uid)
        self.live, self.in_training = line["live"], line["in_training"]

    def refund(self) -> None:
        self.live -= 1

    def take(self, line: Line) -> None:
        """Batch w is taken at u = w, of at most B prompts."""
        n, step = line["n_groups"], line["step"]
        if not step == line["clock"] == self.w == self.u:
            text = (
                f"batch w is taken when update w is next: step {step} at clock {line['clock']}, w {self.w}, u {self.u}"
            )
            self.file.add("I6", text, step=step)
        self._agree(line, ("u", "v"))
        if self.setup.batch_size is not None and n > self.setup.batch_size:
            self.file.add("I8", f"a batch has at most B = {self.setup.batch_size} groups: {n}", step=step)
        self.live -= n
        self.in_training += n
        self._taken.append((step, n))
        self.w = step + 1

    def update(self, line: Line) -> None:
        version = line["version"]
        self.n_updates += 1
        if not version == line["u"] == self.u + 1 == self.w:
            text = f"an update makes version u + 1, of the batch taken: {version} (u {self.u}, w {self.w})"
            self.file.add("I6", text, version=version)
        self.u = version

    def push(self, line: Line) -> None:
        version, is_late = line["version"], line["catch_up"]
        if version != self.u and not (is_late and version == self.v):
            text = f"a push brings u, a catch-up push v: {version} (u {self.u}, v {self.v})"
            self.file.add("I6", text, push=line["push"], version=version)
        if not is_late:
            self._pushes[version] = (line["push"], line["t"])

    def publish(self, line: Line) -> None:
        """v grows up to u, and the credits of the batches that it holds return."""
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
            self._in_time(*began, line["t"], version)

    def close(self, t: float) -> None:
        """At the last line: a push that is still in flight is within its deadline."""
        for version, (push, began) in self._pushes.items():
            self._in_time(push, began, t, version)

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
