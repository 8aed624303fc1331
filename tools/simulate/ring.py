"""A discrete-event model of a ring for the planner: generators, rewards and a learner around the production gate.

A generator's `progress` counts the tokens of an imaginary sample that began at time 0. A sample ends at a fixed
progress, at any speed, so an event costs O(log slots).

As in production: groups go to the least loaded generator with room, at eta = 0 a whole batch in equal shares; the B
oldest complete groups form a batch; at most one push is in flight, and its publication returns the credits. Not
modelled: failures, a queue at the rewards, and the head's own time.
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

EPSILON_TOKENS = 1e-6  # rounding of progress


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One sample to decode."""

    uid: int
    length: int  # tokens


@dataclass(frozen=True, slots=True)
class CompletedSample:
    """A sample with all its tokens."""

    sample: PlannedSample
    spans: list[list[int]]  # [[version, n_tokens], ...]


class PlannedGenerator:
    """One generator. Call `advance` before any other method, to set the time."""

    def __init__(self, schedule: Schedule, index: int) -> None:
        self.index = index
        self.version = 0
        self.pending: int | None = None  # a version that waits for the end of the live samples (drain)
        self.speed = 1.0  # below 1 while the learner uses the device, too
        self.live_s = self.idle_s = 0.0  # sum of seconds over samples; seconds without a sample
        self.n_tokens = 0  # of complete samples
        self._schedule = schedule
        self._live: list[
            tuple[float, int, float, PlannedSample]
        ] = []  # heap of (progress at its end, number, progress at its start, sample)
        self._waiting: deque[PlannedSample] = deque()
        self._prompts: Counter[int] = Counter()  # uid -> live samples
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # (progress at which the version was loaded, version)
        self._progress = self._since = self._stalled_until = 0.0
        self._sequence = 0  # samples begun

    @property
    def load(self) -> int:
        """Live and waiting samples."""
        return len(self._live) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        return bool(self._live)

    def live_tokens(self) -> float:
        """Tokens of the samples that are not complete."""
        return sum(self._progress - begin for _, _, begin, _ in self._live)

    def advance(self, now: float) -> None:
        begin, self._since = self._since, now
        self.live_s += (now - begin) * len(self._live)
        if not self._live:
            self.idle_s += now - begin
            return
        decoded_s = now - max(begin, self._stalled_until)
        if decoded_s > 0:
            self._progress += decoded_s / self._seconds_per_token()

    def next_end(self) -> float | None:
        """Time at which the first of its samples ends, at the current speed."""
        if not self._live:
            return None
        left = max(0.0, self._live[0][0] - self._progress)
        return max(self._since, self._stalled_until) + left * self._seconds_per_token()

    def lease(self, samples: list[PlannedSample]) -> None:
        self._waiting.extend(samples)
        self._begin()

    def collect(self) -> list[CompletedSample]:
        """Remove the samples that have ended, and start waiting ones."""
        ended = []
        while self._live and self._live[0][0] <= self._progress + EPSILON_TOKENS:
            _, _, begin, sample = heapq.heappop(self._live)
            self._prompts[sample.uid] -= 1
            if not self._prompts[sample.uid]:
                del self._prompts[sample.uid]
            self.n_tokens += sample.length
            ended.append(CompletedSample(sample, self._spans(begin, sample.length)))
        self._begin()
        return ended

    def update(self, version: int) -> bool:
        """Load new weights; under `drain` later, after the live samples. Returns whether they are loaded."""
        schedule = self._schedule
        if schedule.on_update == "drain" and self._live:
            self.pending = version
            return False
        self.pending = None
        cost_s = schedule.speeds.update_s
        if schedule.on_update == "recompute":
            again = self.live_tokens() + len(self._prompts) * schedule.prompt_tokens
            cost_s += schedule.speeds.prefill_s(round(again))
        self._stall(cost_s)
        self._updates.append((self._progress, version))
        self.version = version
        self._begin()
        return True

    def _begin(self) -> None:
        """Start waiting samples in free slots. A prompt of a live sample costs no prefill."""
        while self._waiting and len(self._live) < self._schedule.slots and self.pending is None:
            sample = self._waiting.popleft()
            if not self._prompts[sample.uid]:
                self._stall(self._schedule.speeds.prefill_s(self._schedule.prompt_tokens))
            self._prompts[sample.uid] += 1
            self._sequence += 1
            heapq.heappush(self._live, (self._progress + sample.length, self._sequence, self._progress, sample))

    def _stall(self, seconds: float) -> None:
        """Stop decoding for this time."""
        self._stalled_until = max(self._stalled_until, self._since) + seconds / self.speed

    def _seconds_per_token(self) -> float:
        """Time of one decode step: one token for each live sample."""
        return self._schedule.speeds.step_s(len(self._live)) / self.speed

    def _spans(self, begin: float, length: int) -> list[list[int]]:
        """Version spans of a sample that began at this progress."""
        first = bisect_right(self._updates, begin + EPSILON_TOKENS, key=lambda mark: mark[0]) - 1
        spans, done = [], 0
        for at in range(first, len(self._updates)):
            ends = self._updates[at + 1][0] - begin if at + 1 < len(self._updates) else length
            upto = min(length, round(ends))
            if upto > done:
                spans.append([self._updates[at][1], upto - done])
                done = upto
        return spans


SHARED_SPEED = 0.5  # relative speed of each half while both use one device


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
        self._learner_left_s, self._learner_time, self._update_event = 0.0, 0.0, -1

    def run(self, n_steps: int) -> None:
        """Run until `n_steps` updates are finished."""
        self._apply_transitions(set(self.generators))
        while self.gate.u < n_steps:
            self.now, number, what, which = heapq.heappop(self._events)
            touched: set[PlannedGenerator] = set()
            if what == "sampled":
                if self._next_end_event.get(which) != number:
                    continue
                touched.add(self._advance(self.generators[which]))
                self._collect(self.generators[which])
            elif what == "scored":
                if not self._count_score(which):
                    continue
            elif what == "trained":
                if number != self._update_event:
                    continue
                self._finish_update()
            elif what == "arrived":
                touched |= self._receive_weights()
            else:
                self.gate.publish(which)
                self._pushing = None
            self._apply_transitions(touched)

    # events

    def _collect(self, generator: PlannedGenerator) -> None:
        for sampled in generator.collect():
            group = self._groups[sampled.sample.uid]
            group.done.append(sampled)
            self._add_event(self.now + self.schedule.reward_s, "scored", group.uid)
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
        if self.schedule.shares_device:
            touched |= self._share_device()
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
        self._learner_left_s = self.schedule.step_s + n_tokens / self.schedule.train_tokens_per_s
        self._learner_time = self.now
        self._update_event = self._add_event(self.now + self._learner_left_s, "trained", 0)

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
        self._advance(generator).lease([PlannedSample(uid, self._length(uid * n + sample)) for sample in range(n)])
        return generator

    def _length(self, index: int) -> int:
        while len(self._lengths) <= index:
            drawn = self.schedule.lengths.draw(self._random.random())
            self._lengths.append(min(drawn, self.schedule.max_tokens))
        return self._lengths[index]

    # time

    def _share_device(self) -> set[PlannedGenerator]:
        """Halve the speed of generator and learner while both use the device."""
        (generator,) = self.generators
        both = generator.is_busy and self._training is not None
        if both == (generator.speed < 1.0):
            return set()
        self._advance(generator)
        if self._training is not None:
            self._learner_left_s -= (self.now - self._learner_time) * generator.speed
            self._learner_time = self.now
        generator.speed = SHARED_SPEED if both else 1.0
        if self._training is not None:
            self._update_event = self._add_event(
                self.now + max(0.0, self._learner_left_s) / generator.speed, "trained", 0
            )
        return {generator}

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
