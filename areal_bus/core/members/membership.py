"""The members of the ring. Their states change as MEMBER_STATES says; a new incarnation is a new member."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from areal_bus.core.parts.state_table import StateTable
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Join, Role


class MemberState(StrEnum):
    JOINING = "joining"
    STALE = "stale"
    HEALTHY = "healthy"
    DEAD = "dead"


MEMBER_STATES = StateTable(
    "member",
    {MemberState.JOINING: "Its Join has arrived; it loads."},
    {
        (MemberState.JOINING, MemberState.STALE): "A generator is ready; it holds no published version yet.",
        (MemberState.JOINING, MemberState.HEALTHY): "A reward or a learner is ready.",
        (MemberState.STALE, MemberState.HEALTHY): "A generator has completed a push (I7).",
        (MemberState.HEALTHY, MemberState.STALE): "A generator has missed a push.",
        (MemberState.STALE, MemberState.DEAD): "A generator is silent too long, or its connection has ended.",
        (
            MemberState.HEALTHY,
            MemberState.DEAD,
        ): "A generator or reward is silent too long, or its connection has ended.",
        (MemberState.DEAD, MemberState.STALE): "A generator's heartbeats return; its leases are lost.",
        (MemberState.DEAD, MemberState.HEALTHY): "A reward's heartbeats return.",
    },
)


@dataclass(slots=True)
class Member:
    """One incarnation of one actor."""

    name: str
    role: Role
    index: int
    incarnation: int
    endpoint: str
    heard: float  # monotonic seconds
    again: int = 0  # grows with each time it joins again; a learner does so only when it has survived a head
    standing: MemberState = MemberState.JOINING  # set by Membership alone, which counts
    ready: bool = False
    capacity: int = 0  # samples that it is leased at once
    leased: set[tuple[str, int, int, int]] = field(default_factory=set)  # (evaluation, uid, attempt, sample) in work
    unscored: set[tuple[str, int, int, int]] = field(default_factory=set)  # of a guest: sampled, without a verdict
    version: int | None = None  # of the weights it holds
    note: str = ""
    progress: int = 0
    leaving: bool = False  # it wants no further work
    alone: bool = False  # it samples a prompt that is run alone
    n_asked: int = 0  # Rejoins that it was sent and has not answered with a Join
    has_failed: bool = False  # it has reported the error with which it exits
    is_cut: bool = False  # its connection has ended: messages in flight are lost
    cannot_hear_head: bool = False  # we receive its messages; it does not receive ours
    cannot_hear_since: float | None = None  # when it first reported that it does not receive ours; None: it does
    gap_s: float = 0.0  # the longest of late between two signs of life (areal_bus/core/members/membership.py)

    @property
    def load(self) -> int:
        """Samples leased and not yet sampled."""
        return len(self.leased)

    @property
    def room(self) -> int:
        """Number of further samples that may be leased to it. A guest has at most as many without a verdict beside."""
        if self.alone or self.leaving:
            return 0
        return self.capacity - self.load - max(0, len(self.unscored) - self.capacity)

    @property
    def can_be_lost(self) -> bool:
        """Whether silence makes it dead: it has work, or may get some."""
        return self.ready and self.role is not Role.LEARNER and self.standing is not MemberState.DEAD

    def release(self, evaluation: str, uid: int, attempt: int) -> None:
        """Remove the leases of this group."""
        self.leased = {lease for lease in self.leased if lease[:3] != (evaluation, uid, attempt)}
        if self.unscored:
            self.unscored = {lease for lease in self.unscored if lease[:3] != (evaluation, uid, attempt)}


class Membership:
    """All members by name; dead ones stay listed until a newer incarnation joins."""

    def __init__(self, *, silent_s: float) -> None:
        self.patience = Patience(silent_s)
        self.awake_from = 0.0  # reports of missing heartbeats before this time are true: the head itself was stopped
        self.by_name: dict[str, Member] = {}
        self.ready_generators = set[int]()  # by index, those that have been ready once
        self._of_role: dict[Role, list[Member]] = {role: [] for role in Role}  # by index
        self._n_standing: Counter[tuple[Role, MemberState]] = Counter()

    def join(self, message: Join, now: float) -> Member:
        """Add a member; joining again starts anew, except a learner. Raises ImpossibleEvent: older incarnation (I6)."""
        role = Role(message.role)
        if message.name != f"{role}-{message.index}.{message.incarnation}":
            raise ImpossibleEvent(f"a name is ROLE-INDEX.INCARNATION; got {message.name!r}")
        for other in self.of(role, index=message.index):
            if other.name == message.name and (role is Role.LEARNER or other.again >= message.again):
                other.heard, other.again = now, max(other.again, message.again)
                return other
            if other.incarnation > message.incarnation:
                raise ImpossibleEvent(f"{other.name} is newer than {message.name}: an older incarnation stays out")
            self.remove(other.name)
        member = Member(
            message.name, role, message.index, message.incarnation, message.endpoint, now, again=message.again
        )
        self.by_name[member.name] = member
        self._n_standing[role, member.standing] += 1
        self._of_role[role].append(member)
        self._of_role[role].sort(key=lambda member: member.index)
        return member

    def remove(self, name: str) -> None:
        member = self.by_name.pop(name)
        self._n_standing[member.role, member.standing] -= 1
        self._of_role[member.role].remove(member)

    def replaced_by(self, name: str) -> str | None:
        """The newer incarnation of the same actor, if there is one."""
        actor, _, incarnation = name.rpartition(".")
        alike = [x for x in self.by_name.values() if x.name.rpartition(".")[0] == actor and incarnation.isdecimal()]
        return next((other.name for other in alike if other.incarnation > int(incarnation)), None)

    def heard(self, name: str, now: float) -> Member:
        """Record a message from a member. A dead member is alive again, without its former leases."""
        member = self.by_name.get(name)
        if member is None:
            raise ImpossibleEvent(f"only members may send messages; {name!r} has not joined")
        member.gap_s = self.patience.gap(member.gap_s, now - member.heard)
        member.heard = now
        if member.standing is MemberState.DEAD and not member.cannot_hear_head:
            member.leased.clear()
            member.unscored.clear()
            member.alone = False
            member.version = None
            self._stand(member, self._standing_when_ready(member))
        return member

    def ready(self, name: str, capacity: int) -> Member:
        """The member has finished loading. A repeated call changes nothing."""
        member = self.by_name[name]
        if member.ready:
            return member
        member.ready = True
        member.capacity = capacity
        if member.role is Role.GENERATOR:
            self.ready_generators.add(member.index)
        member.gap_s = 0.0  # gaps while it loaded (imports hold the interpreter) tell nothing of what follows
        self._stand(member, self._standing_when_ready(member))
        return member

    def holds(self, name: str, version: int) -> Member:
        """A completed push: the one way to HEALTHY for a generator (I7)."""
        member = self.by_name[name]
        if not member.ready or member.standing is MemberState.DEAD:
            what = f"unexpected PushDone: {name} is {member.standing}"
            raise ImpossibleEvent(f"{what}; only a ready member completes a push")
        member.version = version
        self._stand(member, MemberState.HEALTHY)
        return member

    def fence(self, name: str) -> Member:
        """A generator missed a push: it gets no new work until it completes a later one."""
        member = self.by_name[name]
        if member.standing is MemberState.HEALTHY:
            self._stand(member, MemberState.STALE)
        return member

    def mark_dead(self, member: Member) -> None:
        self._stand(member, MemberState.DEAD)

    def silent(self, until: float) -> list[tuple[Member, float]]:
        """Generators and rewards that just died by silence, each with the limit exceeded; learners have no limit.

        `until`: all messages that arrived before are handled, so that a message not yet read is no silence.
        """
        least_s = self.patience.least_s
        lost = []
        quiet = [m for m in self.by_name.values() if m.can_be_lost and until - m.heard > least_s]
        usual_s = self.usual_gap(until) if quiet else 0.0
        for member in quiet:
            limit_s = self.patience.limit(member.gap_s, usual_s)
            if until - member.heard > limit_s:
                lost.append((member, limit_s))
        for member, _ in lost:
            self.mark_dead(member)
        return lost

    def usual_gap(self, until: float) -> float:
        """The usual gap between two signs of life, over all living members."""
        return usual([max(member.gap_s, until - member.heard) for member in self.alive()])

    def limit_s(self, member: Member, until: float) -> float:
        """Silence after which this member counts as dead, at present."""
        return self.patience.limit(member.gap_s, self.usual_gap(until))

    def slept(self, gap_s: float, now: float) -> None:
        """The head itself was stopped for `gap_s`, so this time does not count as silence of any member."""
        for member in self.by_name.values():
            member.heard = min(member.heard + gap_s, now)
            member.cannot_hear_since = None
        self.awake_from = now + self.patience.limit(0.0, self.usual_gap(now))

    def of(self, role: Role, *standings: MemberState, index: int | None = None) -> list[Member]:
        """Members of a role, by index, of these standings (default: all). Counters make empty results cheap."""
        if standings and not any(self._n_standing[role, standing] for standing in standings):
            return []
        found = self._of_role[role]
        if index is not None:
            found = [member for member in found if member.index == index]
        return [member for member in found if member.standing in standings] if standings else list(found)

    def alive(self) -> list[Member]:
        return [m for m in self.by_name.values() if m.standing is not MemberState.DEAD]

    def awaited(self, wanted: Mapping[Role, Iterable[int]], errors: Mapping[str, str]) -> str:
        """Text for people: which wanted members are missing, with the reason from `errors` or their own note."""
        absent = []
        for role, indices in wanted.items():
            known = {member.index: member for member in self.of(role)}
            for index in indices:
                member = known.get(index)
                if member is None:
                    absent.append(f"{role}-{index} has not joined")
                elif member.standing is not MemberState.HEALTHY:
                    why = errors.get(member.name, member.note)
                    absent.append(f"{role}-{index} is {member.standing}" + (f" ({why})" if why else ""))
        return "; ".join(absent) or "nobody is missing"

    def _stand(self, member: Member, standing: MemberState) -> None:
        before, member.standing = member.standing, MEMBER_STATES.move(member.standing, standing)
        self._n_standing[member.role, before] -= 1
        self._n_standing[member.role, standing] += 1

    @staticmethod
    def _standing_when_ready(member: Member) -> MemberState:
        return MemberState.STALE if member.role is Role.GENERATOR else MemberState.HEALTHY


N_INTERVALS = 3  # heartbeats in a row that must be missing
CEILING = 10  # times bus.silent_s: no limit is longer
HALF_S = 30.0  # a long gap counts half after this time, a quarter after twice that
FEWEST = 3  # members whose gaps tell of the machine


class Patience:
    """The limits of one head's members."""

    def __init__(self, silent_s: float) -> None:
        self.least_s = silent_s
        self.most_s = CEILING * silent_s

    def gap(self, longest_s: float, gap_s: float) -> float:
        """The longest gap of late of one member, once another one of `gap_s` has ended."""
        decayed_s: float = longest_s * 0.5 ** (gap_s / HALF_S)
        return min(max(gap_s, decayed_s), self.most_s / N_INTERVALS)

    def limit(self, longest_s: float, usual_s: float) -> float:
        """Silence from which on a member is dead: by its own longest gap, and by `usual` of all members."""
        return min(max(self.least_s, N_INTERVALS * max(longest_s, usual_s)), self.most_s)


def usual(longest_s: Collection[float]) -> float:
    """The gap that at least half of all members have, those that last included: one slow member changes nothing."""
    return sorted(longest_s)[(len(longest_s) - 1) // 2] if len(longest_s) >= FEWEST else 0.0
