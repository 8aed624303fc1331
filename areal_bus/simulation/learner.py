"""Learner ranks without a model: they wait for their shares, update together after a while, and ask again.

A rank trains what the production rule lets it (`runs_under`), and says which runs of tokens those were.
"""

import random
from collections.abc import Callable

from areal_bus import messages as m
from areal_bus.errors import ImpossibleEvent
from areal_bus.simulation.scenario import Scenario
from areal_bus.simulation.world import HEAD, World
from areal_bus.staleness import runs_under

Trained = Callable[[m.ShardItem, list[tuple[int, bool]]], None]


class Learners:
    """All ranks: an update begins when each has its share."""

    def __init__(self, world: World, scenario: Scenario, rng: random.Random, trained: Trained) -> None:
        self.world, self.scenario, self.rng, self._trained = world, scenario, rng, trained
        self.ranks = [Rank(self, f"learner-{i}.0") for i in range(scenario.n_learners)]
        self._waiting: list[m.ShardEnd] = []

    def has_share(self, end: m.ShardEnd) -> None:
        """One rank is ready; the last one starts the update."""
        self._waiting.append(end)
        if len(self._waiting) == len(self.ranks):
            self._waiting.clear()
            delay = self.scenario.update_s * (0.5 + self.rng.random())
            self.world.timer(self.ranks[0].name, delay, self._update, end)

    def train(self, item: m.ShardItem) -> None:
        runs = runs_under(self.scenario.policy, item.spans, item.clock, self.scenario.eta)
        self._trained(item, runs)

    def _update(self, end: m.ShardEnd) -> None:
        version = end.step + 1
        root = self.ranks[0].name
        self.world.send(root, HEAD, m.UpdateDone(version, {}, f"digest {version}"))
        for rank in self.ranks:
            rank.go_on(version, ended=end.last)

    def begin_push(self, begin: m.PushBegin) -> None:
        """The root's part."""
        delay = self.scenario.push_s * (0.5 + self.rng.random())
        self.world.timer(self.ranks[0].name, delay, self._end_push, begin)

    def _end_push(self, begin: m.PushBegin) -> None:
        if self.world.now < self.scenario.calm_s and self.rng.random() < self.scenario.p_push_fault / 3:
            done: m.Message = m.PushBroken(begin.push, begin.version, "the group broke")
        else:
            done = m.PushDone(begin.push, begin.version, f"digest {begin.version}", 0.0, 0.0)
        self.world.send(self.ranks[0].name, HEAD, done)


class Rank:
    """One learner rank."""

    def __init__(self, learners: Learners, name: str) -> None:
        self.name = name
        self._learners = learners
        self._world = learners.world
        self._step = 0
        self._items: list[m.ShardItem] = []

    def begin(self) -> None:
        self._world.send(self.name, HEAD, m.BatchRequest(0))

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.ShardItem):
            self._items.append(message)
        elif isinstance(message, m.ShardEnd):
            self._take_share(message)
        elif isinstance(message, m.NoBatch):
            self._world.send(self.name, HEAD, m.Finished("", ""))
        elif isinstance(message, m.PushBegin):
            self._learners.begin_push(message)
        elif isinstance(message, m.Stop):
            self._world.crash(self.name)

    def _take_share(self, end: m.ShardEnd) -> None:
        if end.step != self._step or len(self._items) != end.n_items:
            raise ImpossibleEvent(f"a share comes whole and in order; {self.name} got {end} with {len(self._items)}")
        for item in self._items:
            self._learners.train(item)
        self._items.clear()
        self._learners.has_share(end)

    def go_on(self, version: int, *, ended: bool) -> None:
        """After an update: the next batch, or the end."""
        self._step = version
        self._world.send(self.name, HEAD, m.Finished("", "") if ended else m.BatchRequest(version))
