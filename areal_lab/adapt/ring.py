"""A ring in virtual time whose split changes between two updates, after a plan or by the production planner.

A change: the learners stop after an update, and the ring trains again `change_s` later. Generators whose ranks learn
give their samples back, without the tokens they have; generators that come begin with the published version. The
others go on sampling.
"""

import math
import random
from collections.abc import Callable
from dataclasses import replace

from areal_bus.core.planner.ring_observer import RingObserver
from areal_lab.adapt.scenario import ShiftingWorkload
from areal_lab.simulate.generator import PlannedGenerator, PlannedSample
from areal_lab.simulate.ring import PlannedGroup, RingModel
from areal_lab.simulate.schedule import Schedule

Wish = Callable[[int], int | None]  # updates finished -> learner ranks that are wanted; None: those that there are


class ContextGenerator(PlannedGenerator):
    """A generator whose live samples cost more with their contexts."""

    def __init__(self, schedule: Schedule, index: int, half_context: float) -> None:
        super().__init__(schedule, index)
        self._half_context = half_context

    def give_back(self) -> set[int]:
        """Drop all samples. Returns the uids of their groups."""
        uids = {sample.uid for *_, sample in self._live} | {sample.uid for sample in self._waiting}
        self._live.clear()
        self._begins = 0.0
        self._waiting.clear()
        self._prompts.clear()
        return uids

    def _step_s(self) -> float:
        """With the contexts as they are now."""
        contexts, speeds = self.live_tokens() / self._half_context, self._schedule.speeds
        return (len(self._live) + contexts + speeds.half_slots) / speeds.decode_tokens_per_s

    @property
    def _growth(self) -> float:
        """What a token of every live sample adds to the time of a decode step."""
        return len(self._live) / self._half_context / self._schedule.speeds.decode_tokens_per_s

    def _seconds_for(self, n_tokens: float) -> float:
        return n_tokens * self._step_s() + self._growth * n_tokens**2 / 2

    def _tokens_in(self, seconds: float) -> float:
        now, growth = self._step_s(), self._growth
        return 2 * seconds / (now + math.sqrt(now**2 + 2 * growth * seconds))


class AdaptiveRing(RingModel):
    """One ring with the workload's lengths. `generators` holds one per rank; only some of them get work."""

    def __init__(self, workload: ShiftingWorkload, *, learners: int, observer: RingObserver | None = None) -> None:
        super().__init__(workload.schedule, seed=workload.seed)
        self.workload, self.learners, self.observer = workload, learners, observer
        self.generators = [
            ContextGenerator(workload.schedule, index, workload.half_context) for index in range(workload.n_ranks)
        ]
        self.n_changes = 0
        self._wish: Wish = lambda step: None
        self.update_ends: list[float] = []
        self._noise = random.Random(f"noise {workload.seed}")
        self._trains_at = 0.0  # the learners of a new split have begun
        self._samples_at = [0.0] * workload.n_ranks  # the generator of each rank has begun
        self._queued: list[PlannedGroup] = []  # given back, to be leased again
        self._train_noise = [self._draw_noise() for _ in range(workload.n_updates + 1)]

    def run_all(self, wish: Wish) -> float:
        """Run all updates; before each, the split that `wish` names. Returns trained tokens a second."""
        self._wish = wish
        self.run(self.workload.n_updates)
        return sum(batch.n_tokens for batch in self.batches) / self.now

    @property
    def mean_lag(self) -> float:
        """Of the trained tokens, in versions."""
        return sum(batch.n_lag for batch in self.batches) / max(1, self.count.trained)

    def change(self, learners: int) -> None:
        """Change the split now, between two updates. Raises ValueError for one without a learner or generator."""
        if learners not in self.workload.splits:
            raise ValueError(f"a split has a learner and a generator; got {learners} of {self.workload.n_ranks} ranks")
        before, self.learners = self.learners, learners
        self.n_changes += 1
        self._trains_at = self.now + self.workload.change_s
        for rank in range(before, learners):  # learns from now on
            generator = self._generator(rank)
            self._advance(generator)
            self._next_end_event.pop(rank, None)
            for uid in sorted(generator.give_back()):
                self._give_back(self._groups[uid])
        for rank in range(learners, before):
            self._samples_at[rank] = self._trains_at
        self._add_event(self._trains_at, "begun", 0)

    # events

    def _handle(self, number: int, what: str, which: int) -> set[PlannedGenerator] | None:
        if what == "begun":
            return set()
        if what == "scored" and self.observer is not None and self._groups[which].missing == 1:
            self.observer.ready(which, self.now)
        touched = super()._handle(number, what, which)
        if what == "published" and self.observer is not None:
            self.observer.published(which, self.now)
        return touched

    def _collect(self, generator: PlannedGenerator) -> None:
        for sampled in generator.collect():
            group = self._groups[sampled.sample.uid]
            group.done.append(sampled)
            self._add_event(self.now + self.schedule.reward_s, "scored", group.uid)
            if self.observer is not None:
                self.observer.sampled(group.uid, sampled.sample.length, self.now)

    def _finish_update(self) -> None:
        super()._finish_update()
        self.update_ends.append(self.now)
        if self.observer is not None:
            self.observer.updated(self.gate.u, self.batches[-1].n_tokens, self.now)
        wanted = self._wish(self.gate.u)
        if wanted is not None and wanted != self.learners and self.gate.u < self.workload.n_updates:
            self.change(wanted)

    def _receive_weights(self) -> set[PlannedGenerator]:
        for generator in self.generators:
            self._advance(generator)
            generator.speed = self._draw_noise()
        return super()._receive_weights()

    # transitions

    def _take(self) -> None:
        if self.now < self._trains_at or self._is_training():
            return
        load = self.workload
        if len(self._ready) >= self.schedule.batch_size:
            speed = load.schedule.train_tokens_per_s * self.learners**load.scaling * self._train_noise[self.gate.u]
            self.schedule = replace(self.schedule, train_tokens_per_s=speed)
        super()._take()
        if self._is_training() and self.observer is not None:
            self.observer.taken(self.learners, self.now)

    def _is_training(self) -> bool:
        return self._training is not None

    def _admit(self) -> set[PlannedGenerator]:
        touched: set[PlannedGenerator] = set()
        while self._queued:
            there = [x for x in self.generators if self._has_work(x.index) and x.load <= self.schedule.max_load]
            if not there:
                return touched
            generator = min(there, key=lambda x: (x.load, x.index))
            self._lease_again(self._queued.pop(0), generator)
            touched.add(generator)
        return touched | super()._admit()

    def _has_work(self, index: int) -> bool:
        """Whether this rank samples now."""
        return index >= self.learners and self.now >= self._samples_at[index]

    def _is_eligible(self, index: int) -> bool:
        return self._has_work(index) and super()._is_eligible(index)

    def _lease(self, generator: PlannedGenerator) -> PlannedGenerator:
        leased = super()._lease(generator)
        if self.observer is not None:
            uid = next(reversed(self._groups))  # the group that was just leased
            self.observer.leased(uid, str(generator.index), self.schedule.n_samples, self.now)
        return leased

    def _give_back(self, group: PlannedGroup) -> None:
        self._queued.append(group)
        if self.observer is not None:
            self.observer.released(group.uid, self.now)

    def _lease_again(self, group: PlannedGroup, generator: PlannedGenerator) -> None:
        """Lease the samples that a group lacks."""
        n = self.schedule.n_samples
        done = {sampled.sample.number for sampled in group.done}
        missing = [PlannedSample(group.uid, self._length(group.uid * n + i), i) for i in range(n) if i not in done]
        self._advance(generator).lease(missing)
        if self.observer is not None:
            self.observer.leased(group.uid, str(generator.index), len(missing), self.now)

    # the workload

    def _length(self, index: int) -> int:
        while len(self._lengths) <= index:
            step = len(self._lengths) // (self.schedule.n_samples * self.schedule.batch_size)
            drawn = self.schedule.lengths.draw(self._random.random()) * self.workload.factor_at(step)
            self._lengths.append(max(1, min(round(drawn), self.schedule.max_tokens)))
        return self._lengths[index]

    def _draw_noise(self) -> float:
        return self._noise.lognormvariate(0.0, self.workload.noise)

    def _generator(self, rank: int) -> ContextGenerator:
        generator = self.generators[rank]
        assert isinstance(generator, ContextGenerator)
        return generator
