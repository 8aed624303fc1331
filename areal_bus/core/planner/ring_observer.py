"""Measures a ring from the events that the head sees: lengths, decode speed, updates and pushes. Pure: no I/O.

The live samples of a generator follow from leases and finished samples: it decodes `slots` of them in the order of
their leases, and the others wait. So each finished sample gives its time a token and the mean number of live samples
beside it. Old figures lose weight: levels within a few updates, or at once when the lengths of the samples have
changed (`LengthShift`), shapes (how time depends on load) slowly.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from areal_bus.core.planner.split_planner import RingFigures

Z = 3.0  # standard errors of the difference: of steady lengths one test in 370 is wrong
FEWEST = 8  # samples that are compared with those before
FEWEST_BEFORE = 16.0  # weight of those before
ALIKE_KEEPS = 0.97  # of what is known of a group's likeness, each time that lengths lose weight
LEAST_VARIANCE = 1e-4  # of the logarithms: equal lengths have none


@dataclass(slots=True)
class LengthShift:
    """The logarithms of lengths (tokens, each above 0), whose old values lose weight."""

    weight: float = 0.0
    total: float = 0.0
    squares: float = 0.0
    # of complete groups: of the differences from the mean of the groups that were added together
    group_squares: float = 0.0  # squares of their sums over a group
    sample_squares: float = 0.0

    @property
    def design_effect(self) -> float:
        """Variance of a mean over that of as many independent samples; at least 1."""
        return max(1.0, self.group_squares / self.sample_squares) if self.sample_squares else 1.0

    def is_seen(self, lengths: Sequence[int]) -> bool:
        """Whether the mean of these lengths differs from that of those before."""
        n = len(lengths)
        if n < FEWEST or self.weight < FEWEST_BEFORE:
            return False
        mean = self.total / self.weight
        variance = max(LEAST_VARIANCE, self.squares / self.weight - mean**2) * self.design_effect
        difference = math.fsum(map(math.log, lengths)) / n - mean
        return abs(difference) > Z * math.sqrt(variance / n + variance / self.weight)

    def add(self, lengths: Sequence[int], groups: Sequence[Sequence[int]]) -> None:
        """Lengths, and those of complete groups: samples that happened to end together are alike for another reason."""
        for log in map(math.log, lengths):
            self.weight += 1.0
            self.total += log
            self.squares += log**2
        logs_by_group = [[math.log(length) for length in group] for group in groups]
        logs = [log for group in logs_by_group for log in group]
        if logs:
            mean = math.fsum(logs) / len(logs)
            self.group_squares += math.fsum(math.fsum(log - mean for log in group) ** 2 for group in logs_by_group)
            self.sample_squares += math.fsum((log - mean) ** 2 for log in logs)

    def fade(self, keeps: float) -> None:
        """Old values keep this part of their weight. How alike the samples of a group are is forgotten slowly."""
        self.weight *= keeps
        self.total *= keeps
        self.squares *= keeps
        self.group_squares *= ALIKE_KEEPS
        self.sample_squares *= ALIKE_KEEPS


LEVEL_KEEPS = 0.7  # weight that a level keeps at each update: half of it comes from the last two updates
SHIFT_KEEPS = 0.15  # of a level that depends on the lengths, when these have changed
SHAPE_KEEPS = 0.97  # of a shape: from the last 23
PRIOR_VARIANCE = 0.04  # the prior of a shape counts as much as loads that vary by a fifth
PRIOR_HALF_SLOTS = 0.25  # prior: this share of the slots, live, decodes at half of the limit
MIN_UPDATES = 3  # before there are figures
STEADY = 0.2  # relative difference of trained and sampled tokens, below which the ring is in a steady state


class DecodeStart(NamedTuple):
    """A sample that a generator decodes."""

    at: float
    live_s: float  # sum of the generator's live samples over time, when it began


@dataclass(slots=True)
class Level:
    """A mean whose old values lose weight."""

    total: float = 0.0
    weight: float = 0.0

    def add(self, value: float, weight: float = 1.0) -> None:
        self.total += value * weight
        self.weight += weight

    def fade(self, keeps: float = LEVEL_KEEPS) -> None:
        self.total *= keeps
        self.weight *= keeps

    @property
    def mean(self) -> float:
        return self.total / self.weight if self.weight else 0.0


@dataclass(slots=True)
class Line:
    """Least squares of y = a + b * x, both relative to their means, with a prior for a / b. Old points lose weight."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0

    def add(self, x: float, y: float) -> None:
        self.weight += 1.0
        self.x += x
        self.y += y
        self.xx += x * x
        self.xy += x * y

    def fade(self) -> None:
        for name in ("weight", "x", "y", "xx", "xy"):
            setattr(self, name, getattr(self, name) * SHAPE_KEEPS)

    def offset(self, prior: float) -> float:
        """a / b: the x that costs as much as what does not depend on x; 0 or more."""
        if not self.weight or not self.x or not self.y:
            return prior
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        variance = max(0.0, self.xx / self.weight / mean_x**2 - 1)  # of x / mean_x
        covariance = self.xy / self.weight / (mean_x * mean_y) - 1
        known = mean_x / (mean_x + prior)  # slope of y / mean_y over x / mean_x by the prior
        slope = (covariance + known * PRIOR_VARIANCE) / (variance + PRIOR_VARIANCE)
        return mean_x * (1 / min(1.0, max(0.1, slope)) - 1)


@dataclass(slots=True)
class Decoder:
    """What one generator decodes."""

    live: int = 0
    live_s: float = 0.0
    since: float = 0.0
    waiting: deque[int] = field(default_factory=deque)  # uids of samples that wait for a slot

    def advance(self, now: float) -> None:
        self.live_s += self.live * (now - self.since)
        self.since = now


@dataclass(slots=True)
class WatchedGroup:
    """A group that is leased."""

    holder: str
    missing: int
    begun: deque[DecodeStart] = field(default_factory=deque)
    lengths: list[int] = field(default_factory=list)  # of its samples under this lease
    last_s: float = 0.0


class RingObserver:
    """Call one method for each event, in order of time. `figures` gives the figures of the ring as it is now."""

    def __init__(self, *, batch_size: int, n_samples: float, slots: int) -> None:
        self._batch_size, self.n_samples, self._slots = batch_size, n_samples, slots
        self._decoders: dict[str, Decoder] = {}
        self._groups: dict[int, WatchedGroup] = {}
        self._length, self._longest = Level(), Level()
        self._shift = LengthShift()
        self._lengths: list[int] = []  # of the samples since the last update
        self._complete: list[list[int]] = []  # lengths of the groups that are complete since then
        self._decode, self._decode_shape = Level(), Line()
        self._train, self._train_shape = Level(), Line()
        self._push, self._reward = Level(), Level()
        self._batch: tuple[float, int] | None = None  # taken at, learner ranks
        self._points: list[tuple[float, float]] = []  # (live samples, seconds a token) since the last update
        self._updated: dict[int, float] = {}  # version -> when
        self._last_update: float | None = None
        self.interval_s: float | None = None  # between the last two updates of a term; None while lengths change
        self.n_updates = 0  # measured

    # events

    def leased(self, uid: int, holder: str, n_samples: int, now: float) -> None:
        """A generator gets the missing samples of a group; a former lease of the group is over."""
        self.released(uid, now)
        if not n_samples:
            return
        self._groups[uid] = WatchedGroup(holder, n_samples)
        decoder = self._decoders.setdefault(holder, Decoder(since=now))
        decoder.waiting.extend([uid] * n_samples)
        self._begin(decoder, now)

    def sampled(self, uid: int, n_tokens: int, now: float) -> None:
        """A sample of a leased group is complete."""
        group = self._groups.get(uid)
        if group is None or not group.begun or n_tokens < 1:
            return
        decoder = self._decoders[group.holder]
        decoder.advance(now)
        began = group.begun.popleft()
        if now > began.at:
            self._points.append(((decoder.live_s - began.live_s) / (now - began.at), (now - began.at) / n_tokens))
        decoder.live -= 1
        self._lengths.append(n_tokens)
        group.lengths.append(n_tokens)
        group.last_s = now
        group.missing -= 1
        if not group.missing:
            self._complete.append(group.lengths)
        self._begin(decoder, now)

    def ready(self, uid: int, now: float) -> None:
        """All samples of a group are scored. Those that were not seen to end free their slots."""
        group = self._groups.get(uid)
        if group is not None and not group.missing:
            self._reward.add(max(0.0, now - group.last_s))
        self.released(uid, now)

    def released(self, uid: int, now: float) -> None:
        """The lease of a group has ended: complete, refunded, or lost by its generator."""
        group = self._groups.pop(uid, None)
        if group is None or not group.missing:
            return
        decoder = self._decoders[group.holder]
        decoder.advance(now)
        decoder.live -= len(group.begun)
        decoder.waiting = deque(other for other in decoder.waiting if other != uid)
        self._begin(decoder, now)

    def taken(self, learners: int, now: float) -> None:
        """A batch is sent to the learner ranks."""
        self._batch = now, learners

    def updated(self, version: int, n_tokens: int, now: float) -> None:
        """The update of that batch is finished; the batch had so many sampled tokens."""
        if self._batch is None:
            return
        (began, learners), self._batch = self._batch, None
        self._measure_lengths()
        expected = self._batch_size * self.n_samples * self._length.mean
        is_steady = abs(n_tokens - expected) < STEADY * expected
        self.interval_s = now - self._last_update if self._last_update is not None and is_steady else None
        self._updated[version] = self._last_update = now
        self.n_updates += 1
        self._fade()
        load, seconds = n_tokens / learners, now - began
        if load and seconds > 0:
            self._train_shape.add(load, seconds)
            self._train.add(seconds / (load + self._train_offset))
        if self._points:
            self._measure_decoding()

    def published(self, version: int, now: float) -> None:
        """A version is published."""
        at = self._updated.pop(version, None)
        if at is not None:
            self._push.add(now - at)
        self._updated = {other: at for other, at in self._updated.items() if other > version}

    def interrupted(self, open_uids: Collection[int], now: float) -> None:
        """A term begins: groups that are not open, and a batch that is not trained, count no more."""
        for uid in [uid for uid in self._groups if uid not in open_uids]:
            self.released(uid, now)
        self._updated.clear()
        self._points.clear()
        self._batch = self._last_update = self.interval_s = None

    # figures

    @property
    def figures(self) -> RingFigures | None:
        """None before there are enough updates."""
        if self.n_updates < MIN_UPDATES or not (self._decode.weight and self._train.weight and self._longest.weight):
            return None
        return RingFigures(
            batch_size=self._batch_size,
            n_samples=self.n_samples,
            slots=self._slots,
            mean_tokens=self._length.mean,
            longest_tokens=max(self._length.mean, self._longest.mean),
            decode_s=self._decode.mean * self._decode_offset,
            decode_sample_s=self._decode.mean,
            train_s=self._train.mean * self._train_offset,
            train_token_s=self._train.mean,
            push_s=self._push.mean,
            reward_s=self._reward.mean,
        )

    @property
    def _decode_offset(self) -> float:
        """Live samples that cost as much as an empty decode step."""
        return self._decode_shape.offset(PRIOR_HALF_SLOTS * self._slots)

    @property
    def _train_offset(self) -> float:
        """Tokens that cost a rank as much as an update without tokens."""
        return self._train_shape.offset(0.0)

    def _measure_lengths(self) -> None:
        """Add the samples since the last update; when lengths have changed, earlier measurements count little."""
        if self._shift.is_seen(self._lengths):
            for level in (self._length, self._longest, self._decode):
                level.fade(SHIFT_KEEPS)
            self._shift.fade(SHIFT_KEEPS)
        self._shift.add(self._lengths, self._complete)
        for level, lengths in ((self._length, self._lengths), (self._longest, map(max, self._complete))):
            for length in lengths:
                level.add(length)
        self._lengths.clear()
        self._complete.clear()

    def _measure_decoding(self) -> None:
        """Add the samples since the last update: to the shape by their spread, to the level by their sums."""
        offset = self._decode_offset
        for n_live, token_s in self._points:
            self._decode_shape.add(n_live, token_s)
        n = len(self._points)
        live, token_s = (sum(point[i] for point in self._points) / n for i in (0, 1))
        self._decode.add(token_s / (live + offset))
        self._points.clear()

    def _fade(self) -> None:
        for level in (self._length, self._longest, self._decode, self._train, self._push, self._reward):
            level.fade()
        self._shift.fade(LEVEL_KEEPS)
        self._decode_shape.fade()
        self._train_shape.fade()

    def _begin(self, decoder: Decoder, now: float) -> None:
        """Waiting samples begin in free slots."""
        decoder.advance(now)
        while decoder.waiting and decoder.live < self._slots:
            uid = decoder.waiting.popleft()
            if (group := self._groups.get(uid)) is not None:
                group.begun.append(DecodeStart(now, decoder.live_s))
                decoder.live += 1
