"""The push queue: one push at a time, with quarantine of members that fail.

A regular push sends the newest finished update to the generators; a catch-up push sends it to late ones. A member
that breaks a push or misses its deadline is fenced. The version is published nevertheless (I11).

A push is collective: one failing member breaks it for all. So a member that missed a push is quarantined: it gets
pushes of its own until it completes one. When many members missed a push together, each half is tried first. A miss
counts against a member if it was the only one, or if the root completed its part. A push that a death or a silent
root broke counts against nobody.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from areal_bus.errors import ImpossibleEvent

NUMBERS = 1_000_000  # pushes of one incarnation of the head
FEW = 4  # members of a broken push up to which each is pushed to alone next
OWN_SHARE = 0.8  # of timeout_s, in which root and members give up by themselves: the rest is for their words to come


@dataclass(slots=True)
class Push:
    """One push in flight."""

    id: int
    version: int
    view: int
    root: str
    members: list[str]
    catch_up: bool
    deadline: float  # monotonic seconds
    done: set[str] = field(default_factory=set)  # root and members that completed
    broken: dict[str, str] = field(default_factory=dict)  # name -> error
    dead: set[str] = field(default_factory=set)  # died in it
    root_is_silent: bool = False  # it has said nothing by its deadline

    @property
    def is_over(self) -> bool:
        return {self.root, *self.members} <= self.done | self.broken.keys()

    @property
    def missing(self) -> list[str]:
        """Members that did not complete."""
        return [name for name in self.members if name not in self.done]

    @property
    def error(self) -> str:
        """The error that broke it: that of the root, if any. Members may only report that the root gave up."""
        return self.broken.get(self.root) or next(iter(self.broken.values()), "no error reported")


@dataclass(slots=True)
class Quarantine:
    """A member that missed a push. It gets pushes alone, or with its lot (half of those that missed it)."""

    lot: int = 0
    misses: int = 0  # of its own, in a row
    again: float = 0.0  # not before this, in monotonic seconds
    error: str = ""


class PushQueue:
    """Numbers pushes and membership views: the same view number means the same, still working group."""

    def __init__(self, *, timeout_s: float, patience: int = 5, incarnation: int = 0) -> None:
        """Push and view numbers of two incarnations of the head never overlap."""
        self.timeout_s = timeout_s
        self.patience = patience
        self.current: Push | None = None
        self.quarantined: dict[str, Quarantine] = {}
        self._n_pushes = self._n_views = incarnation * NUMBERS
        self._views: dict[tuple[str, ...], int] = {}
        self._n_lots = 0
        self._n_silent = 0  # pushes in a row in which the root said nothing

    def begin(self, *, version: int, root: str, members: list[str], catch_up: bool, now: float) -> Push:
        """Start a push. Raises ImpossibleEvent while another is in flight."""
        if self.current is not None:
            raise ImpossibleEvent(f"push {self.current.id} is still in flight: one push at a time")
        key = (root, *members)
        if key not in self._views:
            self._views[key] = self._n_views
            self._n_views += 1
        push = Push(self._n_pushes, version, self._views[key], root, members, catch_up, now + self.timeout_s)
        self._n_pushes += 1
        self.current = push
        return push

    def done(self, id: int, name: str) -> Push:
        push = self._of(id, name)
        push.done.add(name)
        self.quarantined.pop(name, None)
        return push

    def broken(self, id: int, name: str, error: str) -> Push:
        push = self._of(id, name)
        push.broken[name] = error
        return push

    def restart(self) -> None:
        """A term begins: no push is in flight and no group exists. Push and view numbers continue."""
        self.current = None
        self.quarantined.clear()
        self._views.clear()
        self._n_silent = 0

    def lose(self, name: str) -> None:
        """A member died: the push does not wait for it, and its views are invalid."""
        if self.current and name in {self.current.root, *self.current.members} - self.current.done:
            self.current.broken.setdefault(name, "dead")
            self.current.dead.add(name)
        self._views = {key: view for key, view in self._views.items() if name not in key}

    def expire(self, now: float) -> list[str]:
        """After the deadline, stop waiting. Returns the members that missed it."""
        push = self.current
        if push is None or now < push.deadline:
            return []
        late = [name for name in (push.root, *push.members) if name not in push.done | push.broken.keys()]
        push.root_is_silent = push.root in late
        push.broken |= dict.fromkeys(late, f"no answer within {self.timeout_s:g} s")
        return late

    def finish(self, now: float) -> Push:
        """Close the push that is over. The view of a broken push is not used again."""
        push = self.current
        if push is None or not push.is_over:
            raise ImpossibleEvent("only a push that is over can be finished")
        self.current = None
        if push.broken:
            self._views.pop((push.root, *push.members), None)
        self._n_silent = self._n_silent + 1 if push.root_is_silent else 0
        self._judge(push, now)
        return push

    def _judge(self, push: Push, now: float) -> None:
        """Quarantine members that missed the push. A miss counts if no other member can have broken the push."""
        if push.root not in push.done:
            if push.dead:
                return  # a death broke it
            if push.root_is_silent and (self._n_silent == 1 or len(push.members) == 1):
                return  # it may be stopped; when it says nothing again, a member may be why
        is_blamed = push.root in push.done or len(push.members) == 1
        missing = [name for name in push.missing if name not in push.dead]
        size = 1 if is_blamed or len(missing) <= FEW else (len(missing) + 1) // 2
        for i, name in enumerate(missing):
            self._n_lots += i % size == 0
            self._quarantine(name, push, now, is_blamed=is_blamed)

    def _quarantine(self, name: str, push: Push, now: float, *, is_blamed: bool) -> None:
        apart = self.quarantined.setdefault(name, Quarantine())
        apart.lot = self._n_lots
        apart.error = (push.broken.get(name) if push.root in push.done else None) or push.error
        if is_blamed:
            apart.misses += 1
            pause = 2 ** (apart.misses - 2) / 16 if apart.misses > 1 else 0.0
            apart.again = now + min(pause, 1.0) * self.timeout_s

    def next_quarantined(self, names: Iterable[str], now: float) -> list[str]:
        """Of these quarantined members, the next lot: the one with the fewest misses, then the longest wait."""
        due = {name: self.quarantined[name] for name in names if self.quarantined[name].again <= now}
        first = min(due.values(), key=lambda apart: (apart.misses, apart.lot), default=None)
        return [name for name, apart in due.items() if first is not None and apart.lot == first.lot]

    def misses_its_own(self, name: str) -> bool:
        """Whether it is quarantined and missed a push of its own since it last completed one: others do not wait."""
        return name in self.quarantined and self.quarantined[name].misses > 0

    def hopeless(self) -> dict[str, str]:
        """Members that missed `patience` pushes of their own in a row, and the last error."""
        return {name: apart.error for name, apart in self.quarantined.items() if apart.misses >= self.patience}

    def forget(self, name: str) -> None:
        """The member has left the ring."""
        self.quarantined.pop(name, None)

    def _of(self, id: int, name: str) -> Push:
        push = self.current
        if push is None or push.id != id or name not in {push.root, *push.members} or name in push.broken:
            raise ImpossibleEvent(f"unexpected report of {name}: push {id}; in flight is {push.id if push else 'none'}")
        if name in push.done:  # an echo: whoever joined again since then has put these weights away (I7)
            raise ImpossibleEvent(f"{name} completes push {id} once; it already has")
        return push
