"""A ring in virtual time: an event queue around the production gate. One sampler with slots, one learner.

Samples, updates and pushes take times that are given by [virtual_time]. The events decide which version samples each
token and which prompts form a batch. A `SamplerAndLearner` does the work itself. Pure: no torch.
"""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from areal_bus.core.parts.gate import Gate
from areal_lab.settings import VirtualTimeConfig

Key = tuple[int, int]  # uid, sample


class SamplerAndLearner(Protocol):
    """Samples and trains when the ring says so, with real weights."""

    def begin(self, n: int) -> Mapping[int, Sequence[int]]:
        """Draw `n` prompts (fewer at the end of the data) and sample them with the loaded weights.

        uid -> tokens of each sample; no samples for a prompt that cannot be sampled. Uids ascend.
        """

    def continue_from(self, kept: Mapping[Key, int]) -> Mapping[Key, int]:
        """Sample these again behind so many of their tokens, with the loaded weights; returns their new lengths."""

    def is_scored(self, uid: int) -> bool:
        """Score a group whose samples have ended. False: it has no reward and is refunded."""

    def drop(self, uid: int) -> None:
        """The group is too old: its row is issued again."""

    def train_batch(self, uids: Sequence[int]) -> None:
        """Train the next version on these groups."""

    def copy_weights(self) -> None:
        """Copy the newest weights: they are pushed now."""

    def load(self, version: int) -> None:
        """The copied weights have arrived at the sampler."""


class Pace:
    """The times of the tokens of a sample. A random factor with mean 1, by seed, uid and sample, scales all of them."""

    def __init__(self, settings: VirtualTimeConfig, *, seed: int) -> None:
        self._settings, self._seed = settings, seed

    def factor(self, key: Key) -> float:
        """The random factor of a sample."""
        settings, draw = self._settings, random.Random(f"{self._seed}/{key[0]}/{key[1]}")
        if settings.tail == "pareto":
            return (1 - 1 / settings.exponent) * draw.paretovariate(settings.exponent)
        return draw.lognormvariate(-(settings.spread**2) / 2, settings.spread)

    def seconds(self, key: Key, n_tokens: int) -> float:
        """Time of the first `n_tokens` tokens."""
        return self.factor(key) * self._settings.token_s * _series(self._settings.token_growth, n_tokens)

    def begun(self, key: Key, elapsed_s: float, n_tokens: int) -> int:
        """How many of `n_tokens` tokens began before `elapsed_s` seconds. A token has the version of its begin."""
        first_s = self.factor(key) * self._settings.token_s
        return sum(first_s * _series(self._settings.token_growth, i) < elapsed_s for i in range(n_tokens))


def _series(growth: float, n: int) -> float:
    """1 + growth + ... (n terms)."""
    return float(n) if growth == 1 else (growth**n - 1) / (growth - 1)


@dataclass(slots=True)
class LiveGroup:
    """The samples of a leased prompt that have not ended."""

    uid: int
    born: int
    began: float
    lengths: dict[int, int] = field(default_factory=dict)  # sample -> tokens


@dataclass(slots=True)
class Waste:
    """Groups that were sampled for nothing."""

    dropped: int = 0
    failed: int = 0


class VirtualRing:
    """Owns virtual time, the gate, and the queue of events."""

    def __init__(
        self,
        settings: VirtualTimeConfig,
        gate: Gate,
        worker: SamplerAndLearner,
        *,
        slots: int,
        n_samples: int,
        seed: int,
    ) -> None:
        """`slots`: samples that are decoded at once. At eta = 0 a whole batch is leased whatever the slots."""
        self.now = 0.0
        self.waste = Waste()
        self.gate, self._settings, self._worker = gate, settings, worker
        self._slots, self._n_samples = slots, n_samples
        self._pace = Pace(settings, seed=seed)
        self._loaded = gate.v  # version that the sampler holds
        self._groups: dict[int, LiveGroup] = {}
        self._ready: dict[int, int] = {}  # uid -> born, of complete groups
        self._has_data = True
        self._training: list[int] | None = None
        self._overtakers: list[int] = []  # taken prompts that are younger than the oldest live one, with a window
        self._pushing: int | None = None
        self._events: list[tuple[float, int, str, Key]] = []  # heap of (time, number, what, its sample or version)
        self._numbers = itertools.count()
        self._end_events: dict[Key, int] = {}  # live sample -> number of its valid event

    def run(self) -> Iterator[float]:
        """Yields the time of each update; ends at the last one within the given seconds, or with the data."""
        assert self._settings.seconds is not None
        self._apply_transitions()
        while self._events and self._events[0][0] <= self._settings.seconds:
            self.now, number, what, which = heapq.heappop(self._events)
            if what == "ended" and self._end_events.get(which) != number:
                continue
            if what == "ended":
                self._end(which)
            elif what == "arrived":
                self._load(which[0])
            else:
                self._finish_update()
                yield self.now
            self._apply_transitions()
        self.now = self._settings.seconds

    # events

    def _end(self, key: Key) -> None:
        uid, sample = key
        group = self._groups[uid]
        del self._end_events[key], group.lengths[sample]
        if group.lengths:
            return
        del self._groups[uid]
        if self._worker.is_scored(uid):
            self._ready[uid] = group.born
        else:
            self._refund_failed(group.born)

    def _refund_failed(self, born: int) -> None:
        self.gate.refund(born)
        self.waste.failed += 1

    def _load(self, version: int) -> None:
        """The sampler continues its live samples with new weights: tokens that have begun keep their version."""
        self._worker.load(version)
        self._loaded, self._pushing = version, None
        self.gate.publish(version)
        kept: dict[Key, int] = {}
        for uid, group in self._groups.items():
            for sample, length in group.lengths.items():
                n = self._pace.begun((uid, sample), self.now - group.began, length)
                if n < length:
                    kept[uid, sample] = n
        for (uid, sample), length in self._worker.continue_from(kept).items():
            self._plan(self._groups[uid], sample, length)

    def _finish_update(self) -> None:
        assert self._training is not None
        uids, self._training = self._training, None
        self._worker.train_batch(uids)
        self.gate.finish_update(self.gate.w)

    # transitions

    def _apply_transitions(self) -> None:
        """Apply every transition that is possible now."""
        self._drop_too_old()
        self._take()
        if self._pushing is None and self.gate.u > self.gate.v:
            self._worker.copy_weights()
            self._pushing = self.gate.u
            if not self._settings.push_s:
                self._load(self._pushing)
            else:
                self._add_event(self.now + self._settings.push_s, "arrived", (self._pushing, 0))
        self._admit()

    def _drop_too_old(self) -> None:
        """Policy `drop`: refund complete groups that are too old when the learner wants a batch."""
        if self._training is not None:
            return
        for uid, born in sorted(self._ready.items()):
            if self.gate.is_too_old(born):
                del self._ready[uid]
                self.gate.refund(born)
                self._worker.drop(uid)
                self.waste.dropped += 1

    def _take(self) -> None:
        """Give the learner the oldest B complete groups, if the policy and the window allow it."""
        size = self.gate.batch_size
        if self._training is not None:
            return
        chosen = self._oldest(size)
        if len(chosen) < size or not self.gate.may_take(size, Counter(self._ready.values())):
            return
        self._training = chosen
        self.gate.take([self._ready.pop(uid) for uid in chosen])
        if self._settings.window:
            self._overtakers = [uid for uid in [*self._overtakers, *chosen] if uid > min(self._live(), default=uid)]
        self._add_event(self.now + self._settings.update_s, "trained", (self.gate.w, 0))

    def _live(self) -> list[int]:
        """Leased prompts that are not taken, complete ones included."""
        return [*self._ready, *self._groups]

    def _oldest(self, n: int) -> list[int]:
        """The `n` oldest complete groups; with a window, each among so many prompts from the oldest live one on."""
        ready, window = sorted(self._ready), self._settings.window
        if not window:
            return ready[:n]
        live, chosen = sorted(self._live()), list[int]()
        for uid in ready[:n]:
            older = live.index(uid)
            passed = sum(live[0] < taken < uid for taken in [*self._overtakers, *chosen])
            if passed + older >= window:
                break
            chosen.append(live.pop(older))
        return chosen

    def _admit(self) -> None:
        """Lease prompts while the gate is open and there are slots; at eta = 0 a whole batch at once."""
        while self._has_data:
            n = 0
            while self._may_lease(n) and self.gate.may_admit(self._loaded):
                self.gate.admit(self._loaded)
                n += 1
            if not n:
                return
            begun = self._worker.begin(n)
            self._has_data = len(begun) == n
            for _ in range(n - len(begun)):
                self.gate.refund(self._loaded)
            for uid, lengths in begun.items():
                self._start(uid, lengths)

    def _may_lease(self, n_more: int) -> bool:
        if self.gate.eta == 0:
            return not self._groups and self._training is None and self.gate.v == self.gate.u
        load = len(self._end_events) + n_more * self._n_samples
        return load + self._n_samples <= self._slots or load == 0

    def _start(self, uid: int, lengths: Sequence[int]) -> None:
        if not lengths:
            self._refund_failed(self._loaded)
            return
        group = self._groups[uid] = LiveGroup(uid, self._loaded, self.now)
        for sample, length in enumerate(lengths):
            self._plan(group, sample, length)

    # events to come

    def _plan(self, group: LiveGroup, sample: int, length: int) -> None:
        """Add the event of this sample's end."""
        group.lengths[sample] = length
        key = group.uid, sample
        end = group.began + self._pace.seconds(key, length)
        self._end_events[key] = self._add_event(max(end, self.now), "ended", key)

    def _add_event(self, when: float, what: str, which: Key) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (when, number, what, which))
        return number
