"""Which weights go to whom, one push at a time; knows nothing of tensors, groups or sockets.

A regular push brings the newest finished update to every ready generator; a catch-up push brings the published version
to late ones. A member that breaks or misses the deadline is fenced; the version is published all the same (I11).
"""

from dataclasses import dataclass, field

from areal_bus.errors import ImpossibleEvent

NUMBERS = 1_000_000  # pushes of one life of the head


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

    @property
    def is_over(self) -> bool:
        return {self.root, *self.members} <= self.done | self.broken.keys()

    @property
    def missing(self) -> list[str]:
        """Members that did not complete."""
        return [name for name in self.members if name not in self.done]


class Pushes:
    """Numbers pushes and membership views: the same view number means the same, still working group."""

    def __init__(self, *, timeout_s: float, patience: int = 5, life: int = 0) -> None:
        """No two lives of the head have a number in common, for a push or a view."""
        self.timeout_s = timeout_s
        self.patience = patience
        self.current: Push | None = None
        self.failures: dict[str, int] = {}  # name -> pushes missed in a row
        self._n_pushes = self._n_views = life * NUMBERS
        self._views: dict[tuple[str, ...], int] = {}

    def begin(self, *, version: int, root: str, members: list[str], catch_up: bool, now: float) -> Push:
        """Start a push. Raises ImpossibleEvent while another is in flight."""
        if self.current is not None:
            raise ImpossibleEvent(f"one push at a time; push {self.current.id} is in flight")
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
        self.failures.pop(name, None)
        return push

    def broken(self, id: int, name: str, error: str) -> Push:
        push = self._of(id, name)
        push.broken[name] = error
        return push

    def restart(self) -> None:
        """A term begins: no push is in flight and no group is left. Numbers go on."""
        self.current = None
        self.failures.clear()
        self._views.clear()

    def lose(self, name: str) -> None:
        """A member died: nobody waits for it, and its views are gone."""
        if self.current and name in {self.current.root, *self.current.members} - self.current.done:
            self.current.broken.setdefault(name, "dead")
        self._views = {key: view for key, view in self._views.items() if name not in key}

    def expire(self, now: float) -> list[str]:
        """After the deadline nobody is waited for. Returns whom it has passed."""
        push = self.current
        if push is None or now < push.deadline:
            return []
        late = [name for name in (push.root, *push.members) if name not in push.done | push.broken.keys()]
        push.broken |= dict.fromkeys(late, f"no answer within {self.timeout_s:g} s")
        return late

    def finish(self) -> Push:
        """Close the push that is over. A view in which anything broke is never used again."""
        push = self.current
        if push is None or not push.is_over:
            raise ImpossibleEvent("only a push that is over is finished")
        self.current = None
        if push.broken:
            self._views.pop((push.root, *push.members), None)
            for name in push.missing if push.root in push.done else ():  # else it may not be the members' fault
                self.failures[name] = self.failures.get(name, 0) + 1
        return push

    def hopeless(self) -> str | None:
        """A member that missed `patience` pushes in a row."""
        return next((name for name, n in self.failures.items() if n >= self.patience), None)

    def _of(self, id: int, name: str) -> Push:
        push = self.current
        if push is None or push.id != id or name not in {push.root, *push.members} or name in push.broken:
            raise ImpossibleEvent(f"{name} is not awaited in push {id}; in flight is {push.id if push else 'none'}")
        return push
