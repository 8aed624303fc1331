"""The simulated world: a virtual clock, processes that stop, crash and restart, and lossy links.

There are two kinds of messages. Messages that are resent, or covered by a deadline, may be lost, doubled and
reordered. All others behave as on one ZeroMQ connection: delayed, but in order and once; a cut link delays them until
it heals. When a connection to the head breaks, its messages in flight are lost, and the head receives `Disconnected`.
"""

import random
from collections import Counter
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Any, Protocol

from areal_bus import messages as m

HEAD = "head"
REPEATED = {
    m.Trajectory,
    m.Scored,
    m.Sampled,
    m.Ack,
    m.Heartbeat,
    m.HeadHeartbeat,
    m.PushBegin,
    m.PushDone,
    m.PushBroken,
}


class Node(Protocol):
    """A process that takes messages."""

    def receive(self, sender: str, message: m.Message) -> None: ...


class World:
    """`at` runs a call later, `send` delivers a message to a live node, `tell` records a line."""

    def __init__(
        self, rng: random.Random, *, link_s: float, p_lost: float, p_twice: float, calm_s: float, keeps_story: bool
    ) -> None:
        self.rng = rng
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.story: list[tuple[float, str, object]] | None = [] if keeps_story else None
        self._link_s = link_s
        self._p_lost = p_lost
        self._p_twice = p_twice
        self._calm_s = calm_s
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._n_events = 0
        self._arrives: dict[tuple[str, str], float] = {}  # latest arrival on a link, so that order holds
        self.heard: dict[str, float] = {}  # actor -> when it last received a message of the head
        self._cut: dict[str, float] = {}  # actor -> when its links heal
        self._deaf: dict[str, float] = {}  # actor -> when it receives messages of the head again
        self._stopped: dict[str, float] = {}  # actor -> when it goes on
        self._n_deaths: Counter[str] = Counter()

    @property
    def events(self) -> list[tuple[float, int, Callable[..., None], tuple[Any, ...]]]:
        """Events that have not happened yet."""
        return self._events

    @property
    def n_events(self) -> int:
        return self._n_events

    def at(self, when: float, act: Callable[..., None], *args: Any) -> None:
        self._n_events += 1
        heappush(self._events, (when, self._n_events, act, args))

    def step(self) -> None:
        """The next event."""
        self.now, _, act, args = heappop(self._events)
        act(*args)

    def tell(self, what: str, about: object) -> None:
        if self.story is not None:
            self.story.append((self.now, what, about))

    # processes

    def timer(self, name: str, delay: float, act: Callable[..., None], *args: Any) -> None:
        """Run a call of a process later: not while it is stopped, never after its death."""
        self._n_events += 1
        heappush(self._events, (self.now + delay, self._n_events, self._act, (name, act, args)))

    def _act(self, name: str, act: Callable[..., None], args: tuple[Any, ...]) -> None:
        if name not in self.nodes:
            return
        if self._stopped and (goes_on := self._stopped.get(name, 0.0)) > self.now:
            self.at(goes_on, self._act, name, act, args)
        else:
            act(*args)

    def stop(self, name: str, for_s: float) -> None:
        """Stop a process. Messages that it has not received wait for the end of the longest stop, in order."""
        self._stopped[name] = goes_on = max(self._stopped.get(name, 0.0), self.now + for_s)
        self._events = [(goes_on, *x[1:]) if x[2] == self._take_held and x[3][1] == name else x for x in self._events]
        heapify(self._events)

    def cut(self, name: str, for_s: float) -> None:
        self._cut[name] = max(self._cut.get(name, 0.0), self.now + for_s)

    def deafen(self, name: str, for_s: float) -> None:
        """Block the direction from the head: the head still receives its messages."""
        self._deaf[name] = max(self._deaf.get(name, 0.0), self.now + for_s)

    def break_connection(self, name: str) -> None:
        """Break a process's connection to the head. It reconnects at once."""
        link, ways = {name, HEAD}, (self._arrive, self._arrive_again, self._take_held)
        self._events = [one for one in self._events if one[2] not in ways or {*one[3][:2]} != link]
        heapify(self._events)
        self.say_gone(name)

    def lose_under_way(self, sender: str) -> None:
        """The sender died: of its messages in flight, only the first ones of each connection arrive."""
        until: dict[str, float] = {}
        kept = []
        for event in self._events:
            if event[2] == self._arrive and event[3][0] == sender:
                to = event[3][1]
                if event[0] > until.setdefault(to, self.now + 2.0 * self.rng.random() * self._link_s):
                    self.tell(f"{sender} -> {to} lost with its connection", event[3][2])
                    continue
            kept.append(event)
        self._events = kept
        heapify(self._events)

    def say_gone(self, name: str) -> None:
        """The head receives Disconnected, after the messages of the old connection and before those of the next."""
        arrives = self.now + 2.0 * self.rng.random() * self._link_s
        self._arrives[name, HEAD] = max(arrives, self._arrives.get((name, HEAD), 0.0))
        self.at(self._arrives[name, HEAD], self._arrive, name, HEAD, m.Disconnected())

    def crash(self, name: str) -> None:
        """End a process. Messages that it has not received, because it was stopped, are lost."""
        self.nodes.pop(name, None)
        self._stopped.pop(name, None)
        self._n_deaths[name] += 1

    # links

    def send(self, sender: str, to: str, message: m.Message) -> None:
        """Send a message of a process."""
        now, rng = self.now, self.rng
        arrives = now + 2.0 * rng.random() * self._link_s
        is_rough = now < self._calm_s
        heals = max(self._cut.get(sender, 0.0), self._cut.get(to, 0.0)) if self._cut else 0.0
        if self._deaf and sender == HEAD:
            heals = max(heals, self._deaf.get(to, 0.0))
        is_repeated = type(message) in REPEATED
        if is_repeated:
            if heals > now or (is_rough and rng.random() < self._p_lost):
                self.tell(f"{sender} -> {to} lost", message)
                return
        else:
            link = (sender, to)
            arrives = max(arrives, heals, self._arrives.get(link, 0.0))
            self._arrives[link] = arrives
        self._n_events += 1
        heappush(self._events, (arrives, self._n_events, self._arrive, (sender, to, message)))
        if is_rough and (to == HEAD or is_repeated) and rng.random() < self._p_twice and to in self.nodes:
            n_deaths = self._n_deaths[to] if self._n_deaths else 0
            self.at(arrives + rng.expovariate(1.0) * 5.0, self._arrive_again, sender, to, message, n_deaths)

    def _arrive(self, sender: str, to: str, message: m.Message) -> None:
        node = self.nodes.get(to)
        if node is None:
            self.tell(f"{sender} -> {to} is gone", message)
            return
        if self._stopped and (goes_on := self._stopped.get(to, 0.0)) > self.now:
            self.at(goes_on, self._take_held, sender, to, message, self._n_deaths[to])
            return
        if self.story is not None:
            self.tell(f"{sender} -> {to}", message)
        if sender == HEAD:
            self.heard[to] = self.now
        node.receive(sender, message)

    def _take_held(self, sender: str, to: str, message: m.Message, n_deaths: int) -> None:
        """Deliver a message that came while the process was stopped."""
        self._arrive_again(sender, to, message, n_deaths)

    def _arrive_again(self, sender: str, to: str, message: m.Message, n_deaths: int) -> None:
        """A held message, and the double of a message, reach the same incarnation only."""
        if self._n_deaths[to] == n_deaths:
            self._arrive(sender, to, message)
