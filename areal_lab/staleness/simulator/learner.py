"""Simulated learner ranks: rendezvous, begin at a checkpoint, update together, write checkpoints, push.

A rank trains the tokens that the production rule (`runs_under`) selects, and reports those runs. Before each
batch the ranks agree whether all of them have their share; if a head died before, they go on with the next one.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass

from areal_bus import messages as m
from areal_bus.core.parts.staleness import runs_under
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Role
from areal_lab.staleness.simulator.disk import Disk
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import HEAD, World

MODEL = "the model's"  # weights of version 0
LOOK_S = 1.0  # time until a collective breaks after another rank died
Trained = Callable[[m.ShardItem, list[tuple[int, bool]]], None]


@dataclass(frozen=True, slots=True)
class Word:
    """A rank's vote in the agreement: its share, or that there is none; None if its head died."""

    got: m.ShardEnd | m.NoBatch | None
    life: int  # of the newest head that it joined


class Learners:
    """All incarnations of all ranks. An update begins when each rank of the current group has its share."""

    def __init__(self, world: World, scenario: Scenario, rng: random.Random, trained: Trained, disk: Disk) -> None:
        self.world, self.scenario, self.rng, self._trained, self.disk = world, scenario, rng, trained, disk
        self.restarted: Callable[[int, int], None] = lambda index, incarnation: None
        self.weights: dict[tuple[str, int], str] = {}  # (root, version) -> which weights those are
        self.begun: tuple[int, str] = (0, MODEL)  # version and weights that a crew began with last
        self.held: dict[int, str] = {}  # the last two copies in memory: version -> weights
        self._held_in = 0  # split of ranks that made them
        self.drained: int | None = None  # version that the ranks saved when the job drained
        self._met: dict[int, Rank] = {}  # ranks that compute together, by index
        self._words: dict[int, Word] = {}  # of the ranks that wait for the others

    def start(self, index: int, incarnation: int) -> "Rank":
        """A process starts. Rank 0 opens a new rendezvous; members of the old one are lost to it."""
        rank = Rank(self, index, incarnation)
        self.world.nodes[rank.name] = rank
        rank.join()
        if index == 0:
            self._met, self._words = {0: rank}, {}
            self._begin_if_met()
        return rank

    def meet(self, rank: "Rank", root: str) -> None:
        """A rank learns the address of rank 0."""
        is_there = 0 in self._met and self._met[0].name == root and root in self.world.nodes
        if is_there and rank.index not in self._met and rank.split == self._met[0].split:
            self._met[rank.index] = rank
            self._begin_if_met()

    def _begin_if_met(self) -> None:
        if len(self._met) == self._met[0].n_learners:
            delay = 1.0 + self.rng.random()
            self.world.timer(self._met[0].name, delay, self._begin, self._met[0])

    def _begin(self, root: "Rank") -> None:
        """All have loaded: each reports it to the head that all have joined."""
        crew = self._crew(root)
        self.held = self.held if self._held_in == root.split and self.disk.open_rollback is None else {}
        version, self._held_in, self.drained = max([self.disk.newest, *self.held]), root.split, None
        is_restored = version in self.held
        self.held = self.held if is_restored else {}
        self.disk.checkpoints = {other: w for other, w in self.disk.checkpoints.items() if other <= version}
        self.weights[root.name, version] = self.held.get(version) or self.disk.checkpoints.get(version, MODEL)
        for rank in crew:
            rank.begin(version, is_restored=is_restored)

    def say_begin(self, root: "Rank", version: int, life: int, *, lives_on: bool, restored: bool) -> None:
        """Rank 0 reports the start version."""
        weights = self.weights[root.name, version]
        self.begun = (version, weights)
        sealed = sorted(self.disk.checkpoints)
        self.world.send(root.name, HEAD, m.BeginTerm(version, weights, life, lives_on, sealed, None, restored))

    def _crew(self, root: "Rank") -> "list[Rank]":
        """The live ranks that compute with this root; none if one of them is dead."""
        met = list(self._met.values())
        is_whole = self._met.get(0) is root and all(self.world.nodes.get(rank.name) is rank for rank in met)
        return met if is_whole else []

    # the agreement before a batch

    def agree(self, rank: "Rank", word: Word) -> None:
        """One rank waits for the others; the last one lets all continue. The wait ends if one of them dies."""
        if self._met.get(rank.index) is rank:
            self._words[rank.index] = word
            self._settle()
        self.world.timer(rank.name, LOOK_S, self._look, rank, word)

    def _look(self, rank: "Rank", word: Word) -> None:
        """A collective breaks."""
        if rank.word is word:
            if self._met.get(rank.index) is not rank or not self._crew(self._met[0]):
                rank.come_back()
            else:
                self.world.timer(rank.name, LOOK_S, self._look, rank, word)

    def _settle(self) -> None:
        crew = self._crew(self._met[0])
        if len(self._words) < self._met[0].n_learners or not crew:
            return
        words, self._words = list(self._words.values()), {}
        ends = [word.got for word in words if word.got is not None]
        for rank in crew:
            rank.word = None
        if len(ends) < len(crew):
            newest = max(word.life for word in words)
            for rank in crew:
                rank.go_over(newest)
        elif len({(type(end), end.step) for end in ends}) > 1:
            raise ImpossibleEvent(f"all ranks have the same batch; got {ends}")
        elif isinstance(ends[0], m.ShardEnd):
            self._train(crew, ends[0])
        else:
            self._end(crew, ends[0])

    def _train(self, crew: "list[Rank]", end: m.ShardEnd) -> None:
        for rank in crew:
            for item in rank.take_items():
                runs = runs_under(self.scenario.policy, item.spans, item.clock, self.scenario.eta)
                self._trained(item, runs)
        delay = self.scenario.update_s * (0.5 + self.rng.random())
        self.world.timer(crew[0].name, delay, self._update, crew, end)

    # updates and checkpoints

    def _is_whole(self, crew: "list[Rank]") -> bool:
        """Whether all of them are alive; else the collective breaks, and the live ones restart."""
        is_whole = self._crew(crew[0]) == crew
        for rank in [] if is_whole else crew:
            if self.world.nodes.get(rank.name) is rank:
                self.world.timer(rank.name, self.rng.random() * LOOK_S, rank.come_back)
        return is_whole

    def _update(self, crew: "list[Rank]", end: m.ShardEnd) -> None:
        version, root = end.step + 1, crew[0]
        if not self._is_whole(crew):
            return
        weights = self.weights[root.name, version] = f"{version} of {root.name}"
        every, p_timed = self.scenario.checkpoint_every, self.scenario.p_timed
        is_due = bool(every and version % every == 0) or (p_timed > 0 and self.rng.random() < p_timed)
        is_held = self.scenario.p_held > 0 and self.rng.random() < self.scenario.p_held
        if is_held:
            self.held = dict(sorted({**self.held, version: weights}.items())[-2:])
        if root.has_head:
            stats = self._stats(version)
            self.world.send(root.name, HEAD, m.UpdateDone(version, stats, weights, kept=is_due, held=is_held))
        if (is_due and self.rng.random() >= self.scenario.p_disk) or (end.last and self.scenario.checkpoint_at_end):
            self._checkpoint(crew, version, lambda: self._go_on(crew, version, end.last))
        else:
            self._go_on(crew, version, end.last)

    def _stats(self, version: int) -> dict[str, float]:
        """The figures of an update: those of a collapse from one version on, until it is undone."""
        if not self.scenario.collapses_at:
            return {}
        is_bad = version >= self.scenario.collapses_at and self.disk.rollback is None
        return {"ess": 0.1 if is_bad else 1.0, "mismatch_kl": float(is_bad), "lr": 1e-3}

    def _checkpoint(self, crew: "list[Rank]", version: int, then: Callable[[], None]) -> None:
        """A checkpoint takes time; until then nothing of it is on disk."""
        root = crew[0]

        def seal() -> None:
            self.disk.seal(version, self.weights[root.name, version], self.scenario.checkpoint_keep)
            self.world.send(root.name, HEAD, m.Checkpointed(version, ""))
            then()

        self.world.timer(root.name, self.scenario.checkpoint_s * self.rng.random(), seal)

    def _go_on(self, crew: "list[Rank]", version: int, ended: bool) -> None:
        if self._is_whole(crew):
            for rank in crew:
                rank.go_on(version, ended=ended)

    def _end(self, crew: "list[Rank]", message: m.NoBatch) -> None:
        """No further batch: write a last checkpoint if wanted, and end."""
        version = message.step

        def finish() -> None:
            if self._is_whole(crew):
                for rank in crew:
                    rank.finish(drained=message.drained)

        if version in self.disk.checkpoints or not (message.drained or self.scenario.checkpoint_at_end):
            finish()
        else:
            self._checkpoint(crew, version, finish)
        if message.drained:
            self.drained = version

    # pushes

    def begin_push(self, rank: "Rank", begin: m.PushBegin) -> None:
        """The root's part. It waits for a silent member until the deadline."""
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
        split = learners.disk.split or learners.scenario.rules.split
        self.split, self.n_learners = split.number, split.learners  # as its supervisor knew them
        self.word: Word | None = None  # while it waits for the others
        self._learners = learners
        self._world = learners.world
        self._step: int | None = None  # None before it has begun
        self._began_at = 0  # its start version
        self._is_restored = False  # it began from a copy in memory
        self._items: list[m.ShardItem] = []
        self._life: int | None = None  # of the head that it joined
        self._asked: int | None = None  # life of the head that all ranks ask; None before there is one
        self._awaits: int | None = None  # this incarnation of the head, or a later one
        self._asks = False  # it waits for an answer to its batch request
        self._is_idle = False  # there is no further batch
        self._has_drained = False

    def join(self, *, again: int = 0) -> None:
        name, role = self.name, Role.LEARNER
        self._world.send(name, HEAD, m.Join(name, role, self.index, self.incarnation, name, 1, "", again, self.split))

    def begin(self, version: int, *, is_restored: bool = False) -> None:
        """The rank has loaded. All ranks agree on the head to which they report it."""
        self._is_restored = is_restored
        self._step = self._began_at = version
        self._lose_head()

    @property
    def has_head(self) -> bool:
        """Whether the head that it asked is the one that it has joined."""
        return self._asked == self._life

    def receive(self, sender: str, message: m.Message) -> None:
        if isinstance(message, m.ShardItem):
            self._items.append(message)
        elif isinstance(message, m.PeerList):
            self._hear(message)
        elif isinstance(message, m.ShardEnd):
            if len(self._items) != message.n_items:
                raise ImpossibleEvent(f"a share comes whole; {self.name} got {message} with {len(self._items)}")
            self._take(message)
        elif isinstance(message, m.NoBatch):
            self._take(message)
        elif isinstance(message, m.PushBegin):
            self._learners.begin_push(self, message)
        elif isinstance(message, m.Rejoin):
            if message.undo:
                self._learners.held = {}
            if self._step is None or message.anew or message.life == self._life:
                self.come_back()
            else:
                self.join(again=message.life)
        elif isinstance(message, m.Reassign):
            self.come_back()
        elif isinstance(message, m.Stop):
            self._world.crash(self.name)

    def come_back(self) -> None:
        """Restart the rank."""
        if self._world.nodes.get(self.name) is self:
            self._world.crash(self.name)
            self._learners.restarted(self.index, self.incarnation + 1)

    def _hear(self, directory: m.PeerList) -> None:
        """A message of a head that it has joined."""
        is_other, self._life = self._life not in (None, directory.life), directory.life
        if self._step is not None:
            self._follow()
        elif is_other:
            self.come_back()
        else:
            root = next((name for name in directory.names if name.startswith(f"{Role.LEARNER}-0.")), None)
            if self.index and root is not None:
                self._learners.meet(self, root)

    def _follow(self) -> None:
        """The rank has joined a head, perhaps another one than it asked."""
        if self._awaits is not None:
            self.go_over(self._awaits)
        elif (self._asks or self._is_idle) and not self.has_head:
            self._lose_head()

    def _lose_head(self) -> None:
        """Drop the share of a batch: the ranks agree on another head."""
        if self._has_drained:  # its state is on disk
            self.come_back()
            return
        self._agree(None)

    def _agree(self, got: m.ShardEnd | m.NoBatch | None) -> None:
        self._asks = self._is_idle = False
        self.word = Word(got, -1 if self._life is None else self._life)
        self._learners.agree(self, self.word)

    def go_over(self, life: int) -> None:
        """All ranks ask this incarnation of the head once each has joined it, unless a later one appears.

        A share that only some ranks had is dropped.
        """
        self._items.clear()
        if self._life is None or self._life < max(life, 0):
            self._awaits = life
            return
        self._awaits, lives_on, self._asked = None, self._asked is not None, max(life, 0)
        if not self.has_head:
            self._lose_head()
            return
        self._world.send(self.name, HEAD, m.Ready(0))
        if self.index == 0:
            has_more = lives_on and self._now_at > self._began_at  # than a restarted rank has
            restored = self._is_restored and not has_more
            self._learners.say_begin(self, self._now_at, self._asked, lives_on=has_more, restored=restored)
        self._ask()

    @property
    def _now_at(self) -> int:
        return self._step or 0

    def _ask(self) -> None:
        self._asks = True
        self._world.send(self.name, HEAD, m.BatchRequest(self._now_at, self._asked or 0))

    def _take(self, got: m.ShardEnd | m.NoBatch) -> None:
        if isinstance(got, m.NoBatch) and not self._asks:
            return  # the answer to a doubled request
        if got.step != self._step or not self._asks:
            raise ImpossibleEvent(f"batches come in order, when asked for; {self.name} got {got} at {self._step}")
        self._agree(got)

    def take_items(self) -> list[m.ShardItem]:
        """Take its share, to train it now."""
        items, self._items = self._items, []
        return items

    def go_on(self, version: int, *, ended: bool) -> None:
        """After an update: ask for the next batch, or end."""
        self._step = version
        if ended:
            self.finish(drained=False)
        elif self.has_head:
            self._ask()
        else:
            self._lose_head()

    def finish(self, *, drained: bool) -> None:
        """Its checkpoint is written."""
        self._has_drained = drained
        if self.has_head:
            self._is_idle = True
            self._world.send(self.name, HEAD, m.Finished("", ""))
        else:
            self._lose_head()
