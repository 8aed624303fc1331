"""Who belongs to the ring and in what state; knows nothing of sockets, prompts or weights but their version.

JOINING -> STALE -> HEALTHY -> DEAD -> (heard again, or a new incarnation) -> STALE. For a generator only a completed
push makes HEALTHY (I7); a reward or learner is HEALTHY when it is ready.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Join, Role


class Standing(StrEnum):
    JOINING = "joining"
    STALE = "stale"
    HEALTHY = "healthy"
    DEAD = "dead"


@dataclass(slots=True)
class Member:
    """One incarnation of one actor."""

    name: str
    role: Role
    index: int
    incarnation: int
    endpoint: str
    heard: float  # monotonic seconds
    standing: Standing = Standing.JOINING
    ready: bool = False
    capacity: int = 0  # samples at once
    leased: set[tuple[str, int, int, int]] = field(default_factory=set)  # (evaluation, uid, attempt, sample) in work
    version: int | None = None  # of the weights it holds
    note: str = ""
    progress: int = 0

    @property
    def load(self) -> int:
        """Samples leased and not yet sampled."""
        return len(self.leased)

    @property
    def room(self) -> int:
        """Samples it may still be given."""
        return self.capacity - self.load

    def release(self, evaluation: str, uid: int) -> None:
        """It works on this prompt no more."""
        self.leased = {lease for lease in self.leased if lease[:2] != (evaluation, uid)}


class Membership:
    """All members by name; dead ones stay listed until a newer incarnation joins."""

    def __init__(self, *, silent_s: float) -> None:
        self.silent_s = silent_s
        self.by_name: dict[str, Member] = {}
        self._of_role: dict[Role, list[Member]] = {role: [] for role in Role}  # by index

    def join(self, message: Join, now: float) -> Member:
        """A new member, or the same one asking again. Raises ImpossibleEvent for an older incarnation (I6)."""
        role = Role(message.role)
        if message.name != f"{role}-{message.index}.{message.incarnation}":
            raise ImpossibleEvent(f"a name is ROLE-INDEX.INCARNATION; got {message.name!r}")
        known = self.by_name.get(message.name)
        if known is not None:
            known.heard = now
            return known
        for other in [m for m in self.by_name.values() if (m.role, m.index) == (role, message.index)]:
            if other.incarnation > message.incarnation:
                raise ImpossibleEvent(f"{other.name} is newer than {message.name}: an older incarnation stays out")
            del self.by_name[other.name]
            self._of_role[role].remove(other)
        member = Member(message.name, role, message.index, message.incarnation, message.endpoint, now)
        self.by_name[member.name] = member
        self._of_role[role].append(member)
        self._of_role[role].sort(key=lambda member: member.index)
        return member

    def heard(self, name: str, now: float) -> Member:
        """Any sign of life. One taken for dead is back, without credit for what it held."""
        member = self.by_name.get(name)
        if member is None:
            raise ImpossibleEvent(f"only a member may speak; {name!r} has not joined")
        member.heard = now
        if member.standing is Standing.DEAD:
            member.leased.clear()
            member.version = None
            member.standing = self._standing_when_ready(member) if member.ready else Standing.JOINING
        return member

    def ready(self, name: str, capacity: int) -> Member:
        """It has loaded what it needs. Said again it changes nothing."""
        member = self.by_name[name]
        if member.ready:
            return member
        member.ready = True
        member.capacity = capacity
        member.standing = self._standing_when_ready(member)
        return member

    def holds(self, name: str, version: int) -> Member:
        """A completed push: the one way to HEALTHY for a generator (I7)."""
        member = self.by_name[name]
        if not member.ready or member.standing is Standing.DEAD:
            raise ImpossibleEvent(f"only a ready member completes a push; {name} is {member.standing}")
        member.version = version
        member.standing = Standing.HEALTHY
        return member

    def fence(self, name: str) -> Member:
        """It missed a push: no new work until a later one completes."""
        member = self.by_name[name]
        if member.standing is Standing.HEALTHY:
            member.standing = Standing.STALE
        return member

    def silent(self, now: float) -> list[Member]:
        """Members that have just become dead by silence."""
        lost = [m for m in self.by_name.values() if m.standing is not Standing.DEAD and now - m.heard > self.silent_s]
        for member in lost:
            member.standing = Standing.DEAD
        return lost

    def of(self, role: Role, *standings: Standing) -> list[Member]:
        """Members of a role, by index; all standings when none is named."""
        found = self._of_role[role]
        return [member for member in found if member.standing in standings] if standings else list(found)

    def alive(self) -> Iterable[Member]:
        return [m for m in self.by_name.values() if m.standing is not Standing.DEAD]

    def awaited(self, wanted: Mapping[Role, int]) -> str:
        """Who is missing to the wanted numbers, for people."""
        absent = []
        for role, n in wanted.items():
            known = {member.index: member for member in self.of(role)}
            for index in range(n):
                member = known.get(index)
                if member is None:
                    absent.append(f"{role}-{index} has not joined")
                elif member.standing is not Standing.HEALTHY:
                    absent.append(f"{role}-{index} is {member.standing} ({member.note})")
        return "; ".join(absent) or "nobody is missing"

    @staticmethod
    def _standing_when_ready(member: Member) -> Standing:
        return Standing.STALE if member.role is Role.GENERATOR else Standing.HEALTHY
