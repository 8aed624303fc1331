"""The simulated disk. After a crash it holds sealed checkpoints and synced head checkpoints, nothing else."""

import random
from dataclasses import dataclass, field
from math import inf

from areal_bus.core.effects import Discard, Divide, Save
from areal_bus.core.parts.collapse import Rollback, kept_for_rollback
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint
from areal_bus.core.parts.split import Split
from areal_bus.core.parts.terms import Terms, slot
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import HEAD, World


@dataclass(slots=True)
class Disk:
    """The files on disk. They survive all processes."""

    checkpoints: dict[int, str] = field(default_factory=dict)  # version -> which weights those are
    frontiers: dict[int, HeadCheckpoint] = field(default_factory=dict)
    waypoints: dict[int, HeadSavepoint] = field(default_factory=dict)  # the two newest, by `terms.slot`
    term: int | None = None  # newest term that was begun
    rollback: Rollback | None = None  # that the head has ordered
    keeps_good: bool = False  # a checkpoint that a rollback goes back to
    evicted: tuple[int, ...] = ()  # generators, for good, by the heads of this start
    split: Split | None = None  # of the ranks that may change; None before the first one was written

    @property
    def usable(self) -> list[int]:
        """Versions from which a run can resume, oldest first; none that the order of a rollback undoes."""
        order = self.open_rollback
        most = inf if order is None else order.to
        return sorted(version for version in self.checkpoints.keys() & self.frontiers.keys() if version <= most)

    @property
    def open_rollback(self) -> Rollback | None:
        """The order that no term has obeyed yet."""
        next_term = 0 if self.term is None else self.term + 1
        return self.rollback if self.rollback is not None and self.rollback.is_open(next_term) else None

    @property
    def newest(self) -> int:
        """The version from which a learner starts."""
        return max(self.usable, default=0)

    @property
    def whole(self) -> dict[int, HeadCheckpoint]:
        """The state that a restarted head reads."""
        return {**START, **self.frontiers}

    def mark(self, waypoint: HeadSavepoint, *, fails: bool = False) -> None:
        """Replace the savepoint before the last one; a failed write leaves none in its place."""
        self.waypoints.pop(slot(waypoint), None)
        if not fails:
            self.waypoints[slot(waypoint)] = waypoint

    def divide(self, effect: Divide) -> None:
        """A change of the split: its frontier, then the split; both are synced."""
        self.frontiers[effect.checkpoint.version] = effect.checkpoint
        self.split = effect.split

    def seal(self, version: int, weights: str, keep: int) -> None:
        """A checkpoint is complete; those that are no longer needed are removed."""
        self.checkpoints[version] = weights
        kept = kept_for_rollback(self.usable, version) if self.keeps_good else set()
        oldest = min(self.usable[-keep:], default=0)
        self.checkpoints = {other: w for other, w in self.checkpoints.items() if other >= oldest or other in kept}

    def tear(self) -> None:
        """Damage the newest usable checkpoint, if there is an older one."""
        if len(self.usable) > 1:
            del self.checkpoints[self.newest]


class Writer:
    """The thread of one incarnation of the head that writes head checkpoints, one after the other."""

    def __init__(self, world: World, scenario: Scenario, rng: random.Random, disk: Disk, terms: Terms) -> None:
        self.world, self.scenario, self.rng, self.disk, self.terms = world, scenario, rng, disk, terms
        self.is_gone = False  # its head has died: it writes nothing more
        self.has_failed = False
        self._pending: list[Save | Discard] = []
        self._until = 0.0  # busy until then

    def do(self, effect: Save | Discard) -> None:
        """Carry out an effect after the earlier ones."""
        self._pending.append(effect)
        self._until = max(self.world.now, self._until) + self.scenario.frontier_s * self.rng.random()
        self.world.timer(HEAD, self._until - self.world.now, self._do_next)

    def flush(self) -> None:
        """The head waits until everything is on disk."""
        while self._pending:
            self._do_next()

    def _do_next(self) -> None:
        if self.is_gone or not self._pending:
            return
        effect = self._pending.pop(0)
        if isinstance(effect, Discard):
            for version in effect.versions:
                self.disk.frontiers.pop(version, None)
        elif self.scenario.p_disk and self.rng.random() < self.scenario.p_disk:
            self.has_failed = True
        else:
            self.disk.frontiers[effect.checkpoint.version] = effect.checkpoint
            self.terms.saved(effect.checkpoint)
