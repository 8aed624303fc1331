"""Learner ranks without a model: they meet, begin at a checkpoint, update together, write checkpoints, push.

A rank trains what the production rule lets it (`runs_under`), and says which runs of tokens those were.
"""

import random
from collections.abc import Callable

from areal_bus import messages as m
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role
from areal_bus.simulation.disk import Disk
from areal_bus.simulation.scenario import Scenario
from areal_bus.simulation.world import HEAD, World
from areal_bus.staleness import runs_under

MODEL = "the model's"  # weights of version 0
Trained = Callable[[m.ShardItem, list[tuple[int, bool]]], None]


class Learners:
    """All ranks of all lives: an update begins when each rank of the present crew has its share."""

    def __init__(self, world: World, scenario: Scenario, rng: random.Random, trained: Trained, disk: Disk) -> None:
        self.world, self.scenario, self.rng, self._trained, self.disk = world, scenario, rng, trained, disk
        self.restarted: Callable[[int, int], None] = lambda index, incarnation: None
        self.weights: dict[tuple[str, int], str] = {}  # (root, version) -> which weights those are
        self.begun: tuple[int, str] = (0, MODEL)  # version and weights that a crew began with last
        self.drained: int | None = None  # version that a crew went on to disk with, told that the job drains
        self._met: dict[int, Rank] = {}  # ranks that compute together, by index
        self._waiting: dict[int, m.ShardEnd] = {}

    def start(self, index: int, incarnation: int) -> "Rank":
        """A process comes up; rank 0 opens a new meeting, whoever was in the old one is lost to it."""
        rank = Rank(self, index, incarnation)
        self.world.nodes[rank.name] = rank
        self.world.send(rank.name, HEAD, m.Join(rank.name, Role.LEARNER, index, incarnation, rank.name, 1, ""))
        if index == 0:
            self._met, self._waiting = {0: rank}, {}
            self._begin_if_met()
        return rank

    def meet(self, rank: "Rank", root: str) -> None:
        """A rank has heard where rank 0 listens."""
        if 0 in self._met and self._met[0].name == root and root in self.world.nodes and rank.index not in self._met:
            self._met[rank.index] = rank
            self._begin_if_met()

    def _begin_if_met(self) -> None:
        if len(self._met) == self.scenario.n_learners:
            delay = 1.0 + self.rng.random()
            self.world.timer(self._met[0].name, delay, self._begin, self._met[0])

    def _begin(self, root: "Rank") -> None:
        version = self.disk.newest
        self.disk.checkpoints = {other: w for other, w in self.disk.checkpoints.items() if other <= version}
        weights = self.disk.checkpoints.get(version, MODEL)
        self.weights[root.name, version] = weights
        self.begun = (version, weights)
        for rank in self._crew(root):
            self.world.send(rank.name, HEAD, m.Ready(0))
        self.world.send(root.name, HEAD, m.Begin(version, weights))
        for rank in self._crew(root):
            rank.begin(version)

    def _crew(self, root: "Rank") -> "list[Rank]":
        """Those who compute with this root and are there: none when one of them is not."""
        met = list(self._met.values())
        is_whole = self._met.get(0) is root and all(self.world.nodes.get(rank.name) is rank for rank in met)
        return met if is_whole else []

    def has_share(self, rank: "Rank", end: m.ShardEnd) -> None:
        """One rank is ready; the last one starts the update. One that is left of an older crew waits for nobody."""
        if self._met.get(rank.index) is not rank:
            return
        self._waiting[rank.index] = end
        if len(self._waiting) == self.scenario.n_learners:
            self._waiting.clear()
            root = self._met[0]
            delay = self.scenario.update_s * (0.5 + self.rng.random())
            self.world.timer(root.name, delay, self._update, root, end)

    def train(self, item: m.ShardItem) -> None:
        runs = runs_under(self.scenario.policy, item.spans, item.clock, self.scenario.eta)
        self._trained(item, runs)

    def _update(self, root: "Rank", end: m.ShardEnd) -> None:
        version = end.step + 1
        if not self._crew(root):  # a collective breaks
            return
        weights = self.weights[root.name, version] = f"{version} of {root.name}"
        self.world.send(root.name, HEAD, m.UpdateDone(version, {}, weights))
        every = self.scenario.checkpoint_every
        is_due = every and version % every == 0
        if (is_due and self.rng.random() >= self.scenario.p_disk) or (end.last and self.scenario.checkpoint_at_end):
            self._checkpoint(root, version, lambda: self._go_on(root, version, end.last))
        else:
            self._go_on(root, version, end.last)

    def _checkpoint(self, root: "Rank", version: int, then: Callable[[], None]) -> None:
        """It takes a while; nothing of it is there before."""

        def seal() -> None:
            self.disk.seal(version, self.weights[root.name, version], self.scenario.checkpoint_keep)
            self.world.send(root.name, HEAD, m.Checkpointed(version, ""))
            then()

        self.world.timer(root.name, self.scenario.checkpoint_s * self.rng.random(), seal)

    def _go_on(self, root: "Rank", version: int, ended: bool) -> None:
        for rank in self._crew(root):
            rank.go_on(version, ended=ended)

    def end(self, rank: "Rank", message: m.NoBatch) -> None:
        """No further batch: a checkpoint of what there is, if one is wanted, and the end."""
        version = message.step
        if rank.index or version in self.disk.checkpoints or not (message.drained or self.scenario.checkpoint_at_end):
            rank.finish()
        else:
            self._checkpoint(rank, version, rank.finish)
        if message.drained:
            self.drained = version

    def begin_push(self, rank: "Rank", begin: m.PushBegin) -> None:
        """The root's part. It waits for a member that says nothing until its deadline."""
        delay = self.scenario.push_s * (0.5 + self.rng.random())
        if self.scenario.refuses == "silent" and self.scenario.is_refused(begin.members, self.world.now):
            delay = begin.timeout_s
        self.world.timer(rank.name, delay, self._end_push, rank, begin)

    def _end_push(self, rank: "Rank", begin: m.PushBegin) -> None:
        weights = self.weights.get((rank.name, begin.version))
        breaks = self.world.now < self.scenario.calm_s and self.rng.random() < self.scenario.p_push_fault / 3
        breaks = breaks or self.scenario.is_refused(begin.members, self.world.now)
        if weights is None or breaks:
            done: m.Message = m.PushBroken(begin.push, begin.version, "the group broke")
        else:
            done = m.PushDone(begin.push, begin.version, weights, 0.0, 0.0)
        self.world.send(rank.name, HEAD, done)


class Rank:
    """One incarnation of one learner rank."""

    def __init__(self, learners: Learners, index: int, incarnation: int) -> None:
        self.index, self.incarnation = index, incarnation
        self.name = f"{Role.LEARNER}-{index}.{incarnation}"
        self._learners = learners
        self._world = learners.world
        self._step: int | None = None  # None before it has begun
        self._items: list[m.ShardItem] = []
        self._life: int | None = None  # of the head, as it said last

    def begin(self, version: int) -> None:
        self._step = version
        self._world.send(self.name, HEAD, m.BatchRequest(version))

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.ShardItem):
            self._items.append(message)
        elif isinstance(message, m.HeadBeat | m.Directory):
            is_other, self._life = self._life not in (None, message.life), message.life
            if is_other:
                self._come_back()
            elif isinstance(message, m.Directory):
                self._look_for_root(message)
        elif isinstance(message, m.ShardEnd):
            self._take_share(message)
        elif isinstance(message, m.NoBatch):
            self._learners.end(self, message)
        elif isinstance(message, m.PushBegin):
            self._learners.begin_push(self, message)
        elif isinstance(message, m.Rejoin):
            self._come_back()
        elif isinstance(message, m.Stop):
            self._world.crash(self.name)

    def _come_back(self) -> None:
        """It cannot forget: it ends, and begins anew."""
        self._world.crash(self.name)
        self._learners.restarted(self.index, self.incarnation + 1)

    def _look_for_root(self, directory: m.Directory) -> None:
        root = next((name for name in directory.names if name.startswith(f"{Role.LEARNER}-0.")), None)
        if self.index and self._step is None and root is not None:
            self._learners.meet(self, root)

    def _take_share(self, end: m.ShardEnd) -> None:
        if end.step != self._step or len(self._items) != end.n_items:
            raise ImpossibleEvent(f"a share comes whole and in order; {self.name} got {end} with {len(self._items)}")
        for item in self._items:
            self._learners.train(item)
        self._items.clear()
        self._learners.has_share(self, end)

    def go_on(self, version: int, *, ended: bool) -> None:
        """After an update: the next batch, or the end."""
        self._step = version
        if ended:
            self.finish()
        else:
            self._world.send(self.name, HEAD, m.BatchRequest(version))

    def finish(self) -> None:
        """It has written what it had to write."""
        self._world.send(self.name, HEAD, m.Finished("", ""))
