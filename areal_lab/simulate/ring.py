"""A discrete-event model of a ring for the planner: generators, rewards and a learner around the production gate.

As in production: groups go to the least loaded generator with room, at eta = 0 a whole batch in equal shares; the B
oldest complete groups form a batch; at most one push is in flight, and its publication returns the credits. Actors
on shared cores slow each other down (`cores.py`). Not modelled: failures, and a queue at the rewards.
"""

import heapq
import itertools
import random
from collections import Counter
from dataclasses import dataclass, field

from areal_bus.core.parts.gate import Gate
from areal_bus.core.parts.staleness import runs_under
from areal_lab.simulate.cores import Speeds, Work
from areal_lab.simulate.generator import CompletedSample, PlannedGenerator, PlannedSample
from areal_lab.simulate.schedule import Schedule


@dataclass(slots=True)
class PlannedGroup:
    """The samples of one prompt."""

    uid: int
    born: int
    missing: int
    done: list[CompletedSample] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(sampled.sample.length for sampled in self.done)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """The batch of one update."""

    began: float
    ended: float
    n_tokens: int
    n_masked: int
    n_lag: int  # sum of the lags of the trained tokens
    max_lag: int


@dataclass(slots=True)
class TokenCount:
    """Number of tokens by fate. Dropped tokens were sampled and refunded."""

    trained: int = 0
    masked: int = 0
    dropped: int = 0


class RingModel:
    """One ring in virtual time."""

    def __init__(self, schedule: Schedule, *, seed: int = 0) -> None:
        self.schedule = schedule
        self.gate = Gate(batch_size=schedule.batch_size, eta=schedule.eta, policy=schedule.policy)
        self.generators = [PlannedGenerator(schedule, index) for index in range(schedule.n_generators)]
        self.now = 0.0
        self.batches: list[PlannedBatch] = []
        self.count = TokenCount()
        self._random = random.Random(seed)
        self._lengths: list[int] = []  # by uid * n_samples + sample
        self._groups: dict[int, PlannedGroup] = {}  # leased
        self._ready: list[tuple[int, int, PlannedGroup]] = []  # heap by (born, uid)
        self._ready_born: Counter[int] = Counter()
        self._uids = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []  # heap of (time, number, event, its argument)
        self._sequence = itertools.count()
        self._next_end_event: dict[int, int] = {}  # generator -> number of the event of its next completed sample
        self._pushing: int | None = None
        self._training: tuple[float, list[PlannedGroup]] | None = None
        self._learner, self._update_event = Work(), -1
        self._background, self._background_event = Work(), -1  # of head and rewards
        self._speeds = Speeds()

    def run(self, n_steps: int) -> None:
        """Run until `n_steps` updates are finished."""
        self._apply_transitions(set(self.generators))
        while self.gate.u < n_steps:
            self.now, number, what, which = heapq.heappop(self._events)
            touched = self._handle(number, what, which)
            if touched is not None:
                self._apply_transitions(touched)

    def _handle(self, number: int, what: str, which: int) -> set[PlannedGenerator] | None:
        """Handle one event. Returns the generators that it concerns; None for an event that changes nothing."""
        touched: set[PlannedGenerator] = set()
        if what == "sampled":
            if self._next_end_event.get(which) != number:
                return None
            touched.add(self._advance(self.generators[which]))
            self._collect(self.generators[which])
        elif what == "scored":
            if not self._count_score(which):
                return None
        elif what == "trained":
            if number != self._update_event:
                return None
            self._finish_update()
        elif what == "arrived":
            touched |= self._receive_weights()
        elif what == "served":
            if number != self._background_event:
                return None
            self._background.left_s, self._background_event = 0.0, -1
        else:
            self.gate.publish(which)
            self._pushing = None
        return touched

    # events

    def _collect(self, generator: PlannedGenerator) -> None:
        for sampled in generator.collect():
            group = self._groups[sampled.sample.uid]
            group.done.append(sampled)
            self._add_event(self.now + self.schedule.reward_s, "scored", group.uid)
            self._serve()
        if generator.pending is not None and not generator.is_busy:
            generator.update(generator.pending)
            self._publish_when_updated()

    def _count_score(self, uid: int) -> bool:
        """Count a score of the group. Whether the group is complete."""
        group = self._groups[uid]
        group.missing -= 1
        if group.missing:
            return False
        del self._groups[uid]
        heapq.heappush(self._ready, (group.born, uid, group))
        self._ready_born[group.born] += 1
        return True

    def _finish_update(self) -> None:
        assert self._training is not None
        (began, groups), self._training = self._training, None
        self.gate.finish_update(self.gate.w)
        runs = [
            (n, trained, self.gate.u - 1 - version)
            for group in groups
            for sampled in group.done
            for (n, trained), (version, _) in zip(
                runs_under(self.schedule.policy, sampled.spans, self.gate.u - 1, self.schedule.eta),
                sampled.spans,
                strict=True,
            )
        ]
        of_trained = [(n, lag) for n, trained, lag in runs if trained]
        n_trained = sum(n for n, _ in of_trained)
        n_masked = sum(n for n, trained, _ in runs if not trained)
        self.count.trained += n_trained
        self.count.masked += n_masked
        lags = sum(n * lag for n, lag in of_trained), max((lag for _, lag in of_trained), default=0)
        self.batches.append(PlannedBatch(began, self.now, n_trained + n_masked, n_masked, *lags))

    def _receive_weights(self) -> set[PlannedGenerator]:
        """The weights of the push have arrived at all generators."""
        assert self._pushing is not None
        for generator in self.generators:
            self._advance(generator)
            generator.update(self._pushing)
        self._publish_when_updated()
        return set(self.generators)

    def _publish_when_updated(self) -> None:
        """Publish the version when all generators have loaded it."""
        if self._pushing is not None and all(generator.version == self._pushing for generator in self.generators):
            self._add_event(self.now + self.schedule.speeds.update_s, "published", self._pushing)

    # transitions

    def _apply_transitions(self, touched: set[PlannedGenerator]) -> None:
        """Apply every transition that is possible now."""
        self._refund()
        self._take()
        touched |= self._admit()
        if self._pushing is None and self.gate.u > self.gate.v:
            self._pushing = self.gate.u
            self._add_event(self.now + self.schedule.push_s, "arrived", self.gate.u)
        if self.schedule.cores is not None:
            touched |= self._share_cores()
        for generator in sorted(touched, key=lambda x: x.index):  # a set has no reproducible order
            self._plan(generator)

    def _refund(self) -> None:
        """Policy `drop`: refund groups that are too old."""
        while self._ready and self._training is None and self.gate.is_too_old(self._ready[0][0]):
            born, _, group = heapq.heappop(self._ready)
            self._ready_born[born] -= 1
            self.gate.refund(born)
            self.count.dropped += group.n_tokens

    def _take(self) -> None:
        size = self.schedule.batch_size
        if self._training is not None or len(self._ready) < size or not self.gate.may_take(size, self._ready_born):
            return
        taken = [heapq.heappop(self._ready) for _ in range(size)]
        self._ready_born.subtract(born for born, _, _ in taken)
        self.gate.take([born for born, _, _ in taken])
        groups = [group for _, _, group in taken]
        self._training = self.now, groups
        n_tokens = sum(group.n_tokens for group in groups)
        self._learner.left_s, self._learner.since = self.schedule.training_s(n_tokens, size), self.now
        self._update_event = self._add_event(self._learner.end(self._speeds.learner), "trained", 0)

    def _admit(self) -> set[PlannedGenerator]:
        """Lease groups to the least loaded generators while the gate is open; at eta = 0 equal shares of a batch."""
        schedule, gate, touched = self.schedule, self.gate, set[PlannedGenerator]()
        if not gate.free:
            return touched
        if schedule.eta == 0:
            if self._groups or self._training is not None or gate.v < gate.u:
                return touched
            while gate.may_admit(gate.v):
                touched.add(self._lease(self.generators[gate.live % schedule.n_generators]))
            return touched
        loads = [(x.load, x.index) for x in self.generators]
        eligible = [(load, index) for load, index in loads if load <= schedule.max_load and self._is_eligible(index)]
        heapq.heapify(eligible)
        while eligible and gate.free:
            _, index = eligible[0]
            generator = self._lease(self.generators[index])
            touched.add(generator)
            if generator.load <= schedule.max_load and self._is_eligible(index):
                heapq.heapreplace(eligible, (generator.load, index))
            else:
                heapq.heappop(eligible)
        return touched

    def _is_eligible(self, index: int) -> bool:
        """Whether this generator holds the published version, and the gate admits prompts born at its version."""
        version = self.generators[index].version
        return version >= self.gate.v and self.gate.may_admit(version)

    def _lease(self, generator: PlannedGenerator) -> PlannedGenerator:
        self.gate.admit(generator.version)
        uid, n = next(self._uids), self.schedule.n_samples
        self._groups[uid] = PlannedGroup(uid, generator.version, n)
        self._advance(generator).lease([PlannedSample(uid, self._length(uid * n + i), i) for i in range(n)])
        return generator

    def _length(self, index: int) -> int:
        while len(self._lengths) <= index:
            drawn = self.schedule.lengths.draw(self._random.random())
            self._lengths.append(min(drawn, self.schedule.max_tokens))
        return self._lengths[index]

    # time

    def _serve(self) -> None:
        """Head and rewards have work for one more sample."""
        cores = self.schedule.cores
        if cores is not None and cores.sample_s:
            self._background.add(cores.sample_s, self.now, self._speeds.background)
            self._background_event = self._add_event(self._background.end(self._speeds.background), "served", 0)

    def _share_cores(self) -> set[PlannedGenerator]:
        """Change the speeds to those of the actors that compute now. Returns the generators with another speed."""
        assert self.schedule.cores is not None
        busy = sum(generator.is_busy for generator in self.generators)
        trains, serves = self._training is not None, self._background_event >= 0
        speeds = self.schedule.cores.speeds(generators=busy, trains=trains, background=serves)
        before, self._speeds = self._speeds, speeds
        if speeds == before:
            return set()
        if trains:
            self._learner.advance(self.now, before.learner)
            self._update_event = self._add_event(self._learner.end(speeds.learner), "trained", 0)
        if serves:
            self._background.advance(self.now, before.background)
            self._background_event = self._add_event(self._background.end(speeds.background), "served", 0)
        if speeds.generator == before.generator:
            return set()
        for generator in self.generators:
            self._advance(generator).speed = speeds.generator
        return set(self.generators)

    def _advance(self, generator: PlannedGenerator) -> PlannedGenerator:
        generator.advance(self.now)
        return generator

    def _plan(self, generator: PlannedGenerator) -> None:
        """Add the event of its next completed sample."""
        end = generator.next_end()
        if end is None:
            self._next_end_event.pop(generator.index, None)
        else:
            self._next_end_event[generator.index] = self._add_event(end, "sampled", generator.index)

    def _add_event(self, when: float, what: str, which: int) -> int:
        number = next(self._sequence)
        heapq.heappush(self._events, (when, number, what, which))
        return number
