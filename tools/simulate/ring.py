"""A ring in virtual time for the planner: generators, rewards and a learner around the production gate.

`progress` counts the tokens that a sample would have that began at time 0. So each ends at a known progress, whatever
happens to the pace, and an event costs the logarithm of the slots.

As in production: groups go to the least loaded generator with room, at eta = 0 a whole batch in shares; the B oldest
complete groups are a batch; one push is in flight at most, and credits return when it is published. Left out: whatever
fails, rewards that wait for each other, and the head's own time.
"""

import heapq
import itertools
import random
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field

from areal_bus.core.gate import Gate
from areal_bus.core.staleness import runs_under
from tools.simulate.schedule import Schedule

NEAR = 1e-6  # tokens that do not count


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One completion."""

    uid: int
    length: int  # tokens


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """One that is complete."""

    sample: PlannedSample
    spans: list[list[int]]  # [[version, n_tokens], ...]


class PlannedGenerator:
    """Told the time by `advance`, which comes before whatever happens at it."""

    def __init__(self, schedule: Schedule, index: int) -> None:
        self.index = index
        self.version = 0
        self.pending: int | None = None  # a version that waits until the live samples have ended (drain)
        self.speed = 1.0  # below 1 while somebody else has the device, too
        self.live_s = self.idle_s = 0.0  # samples times seconds; seconds without one
        self.n_tokens = 0  # of complete samples
        self._schedule = schedule
        self._live: list[
            tuple[float, int, float, PlannedSample]
        ] = []  # heap of (progress at its end, n, at its begin, which)
        self._waiting: deque[PlannedSample] = deque()
        self._prompts: Counter[int] = Counter()  # uid -> live samples
        self._marks: list[tuple[float, int]] = [(0.0, 0)]  # (progress, version from there on)
        self._progress = self._since = self._stands_until = 0.0
        self._n = 0  # samples begun

    @property
    def load(self) -> int:
        """Samples that it has or waits to begin."""
        return len(self._live) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def live_tokens(self) -> float:
        """Sampled by those that are not complete."""
        return sum(self._progress - begin for _, _, begin, _ in self._live)

    def advance(self, now: float) -> None:
        begin, self._since = self._since, now
        self.live_s += (now - begin) * len(self._live)
        if not self._live:
            self.idle_s += now - begin
            return
        decoded_s = now - max(begin, self._stands_until)
        if decoded_s > 0:
            self._progress += decoded_s / self._token_s()

    def next_end(self) -> float | None:
        """When the first of its samples ends, at this pace."""
        if not self._live:
            return None
        left = max(0.0, self._live[0][0] - self._progress)
        return max(self._since, self._stands_until) + left * self._token_s()

    def lease(self, samples: list[PlannedSample]) -> None:
        self._waiting.extend(samples)
        self._begin()

    def collect(self) -> list[CompletedSample]:
        """What has ended; the slots go to those that wait."""
        ended = []
        while self._live and self._live[0][0] <= self._progress + NEAR:
            _, _, begin, sample = heapq.heappop(self._live)
            self._prompts[sample.uid] -= 1
            if not self._prompts[sample.uid]:
                del self._prompts[sample.uid]
            self.n_tokens += sample.length
            ended.append(CompletedSample(sample, self._spans(begin, sample.length)))
        self._begin()
        return ended

    def update(self, version: int) -> bool:
        """New weights are there. Whether they are swapped in; under `drain` they wait for the live samples."""
        schedule = self._schedule
        if schedule.on_update == "drain" and self._live:
            self.pending = version
            return False
        self.pending = None
        cost_s = schedule.speeds.update_s
        if schedule.on_update == "recompute":
            again = self.live_tokens() + len(self._prompts) * schedule.prompt_tokens
            cost_s += schedule.speeds.prefill_s(round(again))
        self._stand(cost_s)
        self._marks.append((self._progress, version))
        self.version = version
        self._begin()
        return True

    def _begin(self) -> None:
        """Free slots are taken; a prompt that a live sample has costs no prefill."""
        while self._waiting and len(self._live) < self._schedule.slots and self.pending is None:
            sample = self._waiting.popleft()
            if not self._prompts[sample.uid]:
                self._stand(self._schedule.speeds.prefill_s(self._schedule.prompt_tokens))
            self._prompts[sample.uid] += 1
            self._n += 1
            heapq.heappush(self._live, (self._progress + sample.length, self._n, self._progress, sample))

    def _stand(self, seconds: float) -> None:
        """Decoding stops for so long."""
        self._stands_until = max(self._stands_until, self._since) + seconds / self.speed

    def _token_s(self) -> float:
        """For one more token of each live sample."""
        return self._schedule.speeds.step_s(len(self._live)) / self.speed

    def _spans(self, begin: float, length: int) -> list[list[int]]:
        """Who sampled the tokens of a sample that began at this progress."""
        first = bisect_right(self._marks, begin + NEAR, key=lambda mark: mark[0]) - 1
        spans, done = [], 0
        for at in range(first, len(self._marks)):
            ends = self._marks[at + 1][0] - begin if at + 1 < len(self._marks) else length
            upto = min(length, round(ends))
            if upto > done:
                spans.append([self._marks[at][1], upto - done])
                done = upto
        return spans


SHARED = 0.5  # of its speed, when two share a device


@dataclass(slots=True)
class PlannedGroup:
    """A prompt's samples."""

    uid: int
    born: int
    missing: int
    done: list[CompletedSample] = field(default_factory=list)

    @property
    def n_tokens(self) -> int:
        return sum(sampled.sample.length for sampled in self.done)


@dataclass(frozen=True, slots=True)
class PlannedBatch:
    """What one update consumed."""

    began: float
    ended: float
    n_tokens: int
    n_masked: int
    n_lag: int  # sum of the lags of the trained tokens
    max_lag: int


@dataclass(slots=True)
class TokenCount:
    """Tokens by where they are; dropped ones were sampled and refunded."""

    trained: int = 0
    masked: int = 0
    dropped: int = 0


class RingModel:
    """One ring, from its first prompt on."""

    def __init__(self, schedule: Schedule, *, seed: int = 0) -> None:
        self.schedule = schedule
        self.gate = Gate(batch_size=schedule.batch_size, eta=schedule.eta, policy=schedule.policy)
        self.generators = [PlannedGenerator(schedule, index) for index in range(schedule.n_generators)]
        self.now = 0.0
        self.batches: list[PlannedBatch] = []
        self.count = TokenCount()
        self._random = random.Random(seed)
        self._lengths: list[int] = []  # by uid and sample, whoever draws them first
        self._groups: dict[int, PlannedGroup] = {}  # leased
        self._ready: list[tuple[int, int, PlannedGroup]] = []  # heap by (born, uid)
        self._ready_born: Counter[int] = Counter()
        self._uids = itertools.count()
        self._events: list[tuple[float, int, str, int]] = []  # (when, n, what, which)
        self._n = itertools.count()
        self._due: dict[int, int] = {}  # generator -> number of the event that is its next end
        self._pushing: int | None = None
        self._training: tuple[float, list[PlannedGroup]] | None = None
        self._left_s, self._trained_till, self._trained_by = 0.0, 0.0, -1  # the learner's work, and its event

    def run(self, n_steps: int) -> None:
        """Until so many updates are done."""
        self._settle(set(self.generators))
        while self.gate.u < n_steps:
            self.now, number, what, which = heapq.heappop(self._events)
            touched: set[PlannedGenerator] = set()
            if what == "sampled":
                if self._due.get(which) != number:
                    continue
                touched.add(self._touch(self.generators[which]))
                self._collect(self.generators[which])
            elif what == "scored":
                if not self._scored(which):
                    continue
            elif what == "trained":
                if number != self._trained_by:
                    continue
                self._finish_update()
            elif what == "arrived":
                touched |= self._arrived()
            else:
                self.gate.publish(which)
                self._pushing = None
            self._settle(touched)

    # what happens

    def _collect(self, generator: PlannedGenerator) -> None:
        for sampled in generator.collect():
            group = self._groups[sampled.sample.uid]
            group.done.append(sampled)
            self._at(self.now + self.schedule.reward_s, "scored", group.uid)
        if generator.pending is not None and not generator.is_busy:
            generator.update(generator.pending)
            self._swapped()

    def _scored(self, uid: int) -> bool:
        """Whether its group is complete."""
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

    def _arrived(self) -> set[PlannedGenerator]:
        """The weights of a push are with the generators."""
        assert self._pushing is not None
        for generator in self.generators:
            self._touch(generator)
            generator.update(self._pushing)
        self._swapped()
        return set(self.generators)

    def _swapped(self) -> None:
        """Once all have swapped, the version is published."""
        if self._pushing is not None and all(generator.version == self._pushing for generator in self.generators):
            self._at(self.now + self.schedule.speeds.update_s, "published", self._pushing)

    # what follows from it

    def _settle(self, touched: set[PlannedGenerator]) -> None:
        """Whatever may happen now does."""
        self._refund()
        self._take()
        touched |= self._admit()
        if self._pushing is None and self.gate.u > self.gate.v:
            self._pushing = self.gate.u
            self._at(self.now + self.schedule.push_s, "arrived", self.gate.u)
        if self.schedule.shares_device:
            touched |= self._share()
        for generator in sorted(touched, key=lambda x: x.index):  # sets of objects have no order of their own
            self._plan(generator)

    def _refund(self) -> None:
        """Policy `drop`: what is too old goes, and another prompt takes its credit."""
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
        self._left_s = self.schedule.step_s + n_tokens / self.schedule.train_tokens_per_s
        self._trained_till = self.now
        self._trained_by = self._at(self.now + self._left_s, "trained", 0)

    def _admit(self) -> set[PlannedGenerator]:
        """Groups for the least loaded, as long as the gate is open; at eta = 0 shares, when all is still."""
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
        fed = [(load, index) for load, index in loads if load <= schedule.most_load and self._may_have(index)]
        heapq.heapify(fed)
        while fed and gate.free:
            _, index = fed[0]
            generator = self._lease(self.generators[index])
            touched.add(generator)
            if generator.load <= schedule.most_load and self._may_have(index):
                heapq.heapreplace(fed, (generator.load, index))
            else:
                heapq.heappop(fed)
        return touched

    def _may_have(self, index: int) -> bool:
        """Whether this generator holds what is published, and the gate admits what is born at it."""
        version = self.generators[index].version
        return version >= self.gate.v and self.gate.may_admit(version)

    def _lease(self, generator: PlannedGenerator) -> PlannedGenerator:
        self.gate.admit(generator.version)
        uid, n = next(self._uids), self.schedule.n_samples
        self._groups[uid] = PlannedGroup(uid, generator.version, n)
        self._touch(generator).lease([PlannedSample(uid, self._length(uid * n + sample)) for sample in range(n)])
        return generator

    def _length(self, index: int) -> int:
        while len(self._lengths) <= index:
            drawn = self.schedule.lengths.draw(self._random.random())
            self._lengths.append(min(drawn, self.schedule.most_tokens))
        return self._lengths[index]

    # time

    def _share(self) -> set[PlannedGenerator]:
        """The generator and the learner have the device in turns while both work."""
        (generator,) = self.generators
        both = generator.is_busy and self._training is not None
        if both == (generator.speed < 1.0):
            return set()
        self._touch(generator)
        if self._training is not None:
            self._left_s -= (self.now - self._trained_till) * generator.speed
            self._trained_till = self.now
        generator.speed = SHARED if both else 1.0
        if self._training is not None:
            self._trained_by = self._at(self.now + max(0.0, self._left_s) / generator.speed, "trained", 0)
        return {generator}

    def _touch(self, generator: PlannedGenerator) -> PlannedGenerator:
        generator.advance(self.now)
        return generator

    def _plan(self, generator: PlannedGenerator) -> None:
        """When its next sample ends."""
        end = generator.next_end()
        if end is None:
            self._due.pop(generator.index, None)
        else:
            self._due[generator.index] = self._at(end, "sampled", generator.index)

    def _at(self, when: float, what: str, which: int) -> int:
        number = next(self._n)
        heapq.heappush(self._events, (when, number, what, which))
        return number
