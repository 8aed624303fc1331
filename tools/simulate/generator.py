"""One generator in virtual time: its live samples go on at one pace, which their number decides; knows no gate.

`progress` counts the tokens that a sample would have that began at time 0. So each ends at a known progress, whatever
happens to the pace, and an event costs the logarithm of the slots.
"""

import heapq
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass

from tools.simulate.schedule import Schedule

NEAR = 1e-6  # tokens that do not count


@dataclass(frozen=True, slots=True)
class Sample:
    """One completion."""

    uid: int
    length: int  # tokens


@dataclass(frozen=True, slots=True)
class Sampled:
    """One that is complete."""

    sample: Sample
    spans: list[list[int]]  # [[version, n_tokens], ...]


class Generator:
    """Told the time by `advance`, which comes before whatever happens at it."""

    def __init__(self, schedule: Schedule, index: int) -> None:
        self.index = index
        self.version = 0
        self.pending: int | None = None  # a version that waits until the live samples have ended (drain)
        self.speed = 1.0  # below 1 while somebody else has the device, too
        self.live_s = self.idle_s = 0.0  # samples times seconds; seconds without one
        self.n_tokens = 0  # of complete samples
        self._schedule = schedule
        self._live: list[tuple[float, int, float, Sample]] = []  # heap of (progress at its end, n, at its begin, which)
        self._waiting: deque[Sample] = deque()
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

    def lease(self, samples: list[Sample]) -> None:
        self._waiting.extend(samples)
        self._begin()

    def collect(self) -> list[Sampled]:
        """What has ended; the slots go to those that wait."""
        ended = []
        while self._live and self._live[0][0] <= self._progress + NEAR:
            _, _, begin, sample = heapq.heappop(self._live)
            self._prompts[sample.uid] -= 1
            if not self._prompts[sample.uid]:
                del self._prompts[sample.uid]
            self.n_tokens += sample.length
            ended.append(Sampled(sample, self._spans(begin, sample.length)))
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
