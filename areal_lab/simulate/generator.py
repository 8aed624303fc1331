"""A generator of the planner in virtual time: slots, decode speed, weight updates and the versions of its tokens.

`progress` counts the tokens of an imaginary sample that began at time 0. A sample ends at a fixed progress, at any
speed, so an event costs O(log slots).
"""

import heapq
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass

from areal_lab.simulate.schedule import Schedule

EPSILON_TOKENS = 1e-6  # rounding of progress


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One sample to decode."""

    uid: int
    length: int  # tokens
    number: int = 0  # in its group


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
        self.speed = 1.0  # below 1 while others use its core or device, too
        self.live_s = self.idle_s = 0.0  # sum of seconds over samples; seconds without a sample
        self.n_tokens = 0  # of complete samples
        self._schedule = schedule
        self._live: list[
            tuple[float, int, float, PlannedSample]
        ] = []  # heap of (progress at its end, number, progress at its start, sample)
        self._begins = 0.0  # sum of the progress at which the live samples began
        self._waiting: deque[PlannedSample] = deque()
        self._prompts: Counter[int] = Counter()  # uid -> live samples
        self._updates: list[tuple[float, int]] = [(0.0, 0)]  # (progress at which the version was loaded, version)
        self._progress = self._since = 0.0
        self._stall_s = 0.0  # of work at full speed, before it decodes again
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
        return max(0.0, len(self._live) * self._progress - self._begins)

    def advance(self, now: float) -> None:
        begin, self._since = self._since, now
        self.live_s += (now - begin) * len(self._live)
        worked_s = (now - begin) * self.speed
        if not self._live:
            self.idle_s += now - begin
        elif worked_s > self._stall_s:
            self._progress += self._tokens_in(worked_s - self._stall_s)
        self._stall_s = max(0.0, self._stall_s - worked_s)

    def next_end(self) -> float | None:
        """Time at which the first of its samples ends, at the current speed."""
        if not self._live:
            return None
        left = max(0.0, self._live[0][0] - self._progress)
        return self._since + (self._stall_s + self._seconds_for(left)) / self.speed

    def lease(self, samples: list[PlannedSample]) -> None:
        self._waiting.extend(samples)
        self._begin()

    def collect(self) -> list[CompletedSample]:
        """Remove the samples that have ended, and start waiting ones."""
        ended = []
        while self._live and self._live[0][0] <= self._progress + EPSILON_TOKENS:
            _, _, begin, sample = heapq.heappop(self._live)
            self._begins -= begin
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
        self._stall_s += cost_s
        self._updates.append((self._progress, version))
        self.version = version
        self._begin()
        return True

    def _begin(self) -> None:
        """Start waiting samples in free slots. A prompt of a live sample costs no prefill."""
        while self._waiting and len(self._live) < self._schedule.slots and self.pending is None:
            sample = self._waiting.popleft()
            if not self._prompts[sample.uid]:
                self._stall_s += self._schedule.speeds.prefill_s(self._schedule.prompt_tokens)
            self._prompts[sample.uid] += 1
            self._sequence += 1
            self._begins += self._progress
            heapq.heappush(self._live, (self._progress + sample.length, self._sequence, self._progress, sample))

    def _step_s(self) -> float:
        """Time of one decode step at full speed: one token for each live sample."""
        return self._schedule.speeds.step_s(len(self._live))

    def _tokens_in(self, seconds: float) -> float:
        """Tokens that each live sample gets in this time at full speed."""
        return seconds / self._step_s()

    def _seconds_for(self, n_tokens: float) -> float:
        """Time at full speed in which each live sample gets so many tokens."""
        return n_tokens * self._step_s()

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
