"""Recounts pushes from the head's lines: which members completed one, and what may be published (I6)."""

from dataclasses import dataclass, field

from tools.audit.journal_reader import JournalFile, Line
from tools.audit.replay.actor_logs import Evidence
from tools.audit.replay.members import GENERATOR, Members


@dataclass(slots=True)
class LastPush:
    """The last push of this term and incarnation."""

    id: int
    version: int
    n_members: int
    is_catch_up: bool
    done: set[str] = field(default_factory=set)  # members that completed it
    others: set[str] = field(default_factory=set)  # names that broke it or died since it began; not all are its members

    @property
    def is_over(self) -> bool:
        """Whether all members have ended their part, as far as the lines show."""
        return len(self.done | self.others) >= self.n_members


class Pushing:
    """Takes lines about pushes in the head's order, and the state of the members after each."""

    def __init__(self, file: JournalFile, members: Members, evidence: Evidence) -> None:
        self.file, self.members, self.evidence = file, members, evidence
        self.begun: set[tuple[int, int]] = set()  # (push, version) in all incarnations
        self.begin()

    def begin(self) -> None:
        """A term or an incarnation of the head begins: no push is in flight, and none was missed."""
        self._push: LastPush | None = None
        self._missed: set[str] = set()

    def push(self, line: Line, *, v: int) -> None:
        self._end("push", line["push"])
        self.begun.add((line["push"], line["version"]))
        n_stale = len(self.members.stale(v))
        if line["catch_up"] and line["n_members"] > n_stale:
            text = f"a catch-up push is to stale generators: {n_stale} are, not {line['n_members']}"
            self.file.add("I6", text, push=line["push"])
        self._push = LastPush(line["push"], line["version"], line["n_members"], line["catch_up"])

    def hold(self, name: str, version: int) -> None:
        """A generator completed its part."""
        push = self._push
        if push is None or push.version != version or name in push.done or len(push.done) >= push.n_members:
            what = "none" if push is None else f"push {push.id} of {push.n_members}, with version {push.version}"
            text = f"a generator comes to hold a version by a push in flight: {name} {version}, in flight is {what}"
            self.file.add("I6", text, version=version)
        elif name in self.evidence.generators and (name, push.id, version) not in self.evidence.pushed:
            text = f"a push is complete where its member says so: {name} has no line of push {push.id}"
            self.file.add("I6", text, push=push.id, version=version)
        if push is not None:
            push.done.add(name)
        self._missed.discard(name)

    def break_(self, line: Line) -> None:
        """A member, or the root, could not complete its part."""
        name = line["name"]
        if self._push is not None and name.startswith(GENERATOR):
            self._push.others.add(name)
            self._missed.add(name)

    def lose(self, name: str) -> None:
        """The member died, or joins again."""
        if self._push is not None and name.startswith(GENERATOR):
            self._push.others.add(name)

    def publish(self, line: Line) -> None:
        """A version is published when its push is over, or when no member is left to push to."""
        version, push = line["version"], self._push
        self._end("publish", version)
        if push is not None and push.version == version and not push.is_catch_up:
            n_hold = len(push.done)
        else:
            there = [name for name in self.members.there() if name not in self._missed]
            without = [name for name in there if self.members.version.get(name) != version]
            n_hold = len(there) - len(without)
            if without:
                what = f"version {version} was not pushed to {without}"
                self.file.add("I6", f"a version is published when its push is complete: {what}", version=version)
        if line["members"] != n_hold:
            text = f"members are those that completed the push: {n_hold} hold version {version}, not {line['members']}"
            self.file.add("I6", text, version=version)

    def close(self) -> None:
        """Every part of a push that a process reports is of a push that the head began."""
        for (name, push, version), where in self.evidence.pushed.items():
            if (push, version) not in self.begun:
                text = f"a push is begun by the head: {name} has a part of push {push} of version {version}"
                self.file.findings.add("I6", where, text, push=push, version=version)

    def _end(self, what: str, which: int) -> None:
        """One push is in flight at most."""
        push, self._push = self._push, None
        if push is not None and not push.is_over:
            ended = f"{len(push.done | push.others)} of {push.n_members} as {what} {which} comes"
            text = f"a push is over when each member completed it, broke it or is gone: {ended}"
            self.file.add("I6", text, push=push.id, version=push.version)
