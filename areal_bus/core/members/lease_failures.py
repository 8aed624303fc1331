"""Failed leases by generator: which generators are paused, which are to be evicted, and how long a guest may hold one.

Pure: no I/O. A generator that fails each prompt at once is always the least loaded, so it would get every freed credit.
While others succeed it is paused, each time twice as long, and samples one group at a time in between. After PATIENCE
pauses without a success it is evicted and restarted; after EVICTIONS of them, the next one is for good. Failures of all
generators alike count against none of them: then the prompts are the cause.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

FIRST = 3  # failed leases in a row before the first pause
PAUSE_S = 1.0  # the first pause; each later one is twice as long, up to MOST_S; longer where leases time out
MOST_S = 60.0
PATIENCE = 5  # pauses in a row; the next one is an eviction
EVICTIONS = 2  # of an actor in a row, each followed by a restart; the next one is for good


@dataclass(slots=True)
class FailingGenerator:
    """One generator, over its incarnations, since its last success."""

    name: str  # of the incarnation that failed last
    since: int  # successes of all generators when its failures began, or when it was paused last
    n_failed: int = 0  # leases, in a row
    n_known: int = 0  # those before the last pause
    n_pauses: int = 0  # in a row, of this incarnation
    pause_s: float = 0.0  # the last pause
    lasted_s: float = 0.0  # a lease until it timed out
    again: float = 0.0  # not before this, in monotonic seconds
    error: str = ""


@dataclass(frozen=True, slots=True)
class LeasePause:
    """A generator is paused from now on, or evicted."""

    name: str
    why: str
    evicts: bool


class LeaseFailures:
    """Call `failed` and `succeeded` with each result, and `judge` after each event, before work is leased."""

    def __init__(self) -> None:
        self.now = 0.0  # of the last `judge`
        self._n_succeeded = 0
        self._failing: dict[str, FailingGenerator] = {}  # by actor, so that a new incarnation keeps the count
        self._n_evicted: Counter[str] = Counter()  # by actor, since its last success

    def failed(self, name: str, error: str, *, lasted_s: float = 0.0) -> None:
        """A lease of this generator failed, for a cause that may be its own. `lasted_s`: until it timed out."""
        known = self._failing.setdefault(actor_of(name), FailingGenerator(name, self._n_succeeded))
        if known.name != name:
            known.name, known.n_pauses = name, 0
        known.n_failed += 1
        known.error = error
        known.lasted_s = max(known.lasted_s, lasted_s)

    def succeeded(self, name: str) -> None:
        """A sample of this generator has a verdict."""
        self._n_succeeded += 1
        self._failing.pop(actor_of(name), None)
        self._n_evicted.pop(actor_of(name), None)

    def evicted(self, name: str) -> int:
        """It is evicted, for failed leases or failed pushes. Returns how often since its last success."""
        self._n_evicted[actor_of(name)] += 1
        return self._n_evicted[actor_of(name)]

    def excuse(self, actors: set[str]) -> None:
        """These generators all failed at one prompt, which is refunded: it counts against none of them."""
        for actor in actors:
            known = self._failing.get(actor)
            if known is not None:
                known.n_failed -= 1
                known.n_known = min(known.n_known, known.n_failed)
                if not known.n_failed:
                    del self._failing[actor]

    def judge(self, now: float) -> list[LeasePause]:
        """The generators to pause or to evict now: they failed again while others succeeded."""
        self.now = now
        return [self._pause(known) for known in self._failing.values() if self._is_due(known)]

    def _is_due(self, known: FailingGenerator) -> bool:
        fails_on = known.n_failed >= FIRST and known.n_failed > known.n_known
        return fails_on and self._n_succeeded > known.since and known.again <= self.now

    def _pause(self, known: FailingGenerator) -> LeasePause:
        known.n_pauses += 1
        known.n_known, known.since = known.n_failed, self._n_succeeded
        known.pause_s = max(min(2 * known.pause_s or PAUSE_S, MOST_S), known.n_pauses * known.lasted_s)
        known.again = self.now + known.pause_s
        evicts = known.n_pauses > PATIENCE
        why = f"its last {known.n_failed} leases failed while others succeeded; the last error: {known.error[:300]}"
        return LeasePause(known.name, why if evicts else f"paused for {known.pause_s:g} s: {why}", evicts)

    def is_failing(self, name: str) -> bool:
        """Whether its last lease failed."""
        return actor_of(name) in self._failing

    def is_paused(self, name: str) -> bool:
        known = self._failing.get(actor_of(name))
        return known is not None and known.again > self.now

    def is_on_probation(self, name: str) -> bool:
        """Whether it samples one group at a time."""
        known = self._failing.get(actor_of(name))
        return known is not None and known.pause_s > 0


def actor_of(name: str) -> str:
    """The actor of this incarnation: generator-1 of generator-1.0."""
    return name.rpartition(".")[0] or name


LEAST_S = 300.0  # longer than RESEND_S of a generator and than the first request of a cold engine
TIMES = 4.0  # a guest may have slower hardware


class LeaseLimit:
    """Call `note` with each complete lease of an own generator."""

    def __init__(self) -> None:
        self._longest_s = 0.0

    def note(self, lasted_s: float) -> None:
        self._longest_s = max(self._longest_s, lasted_s)

    def seconds(self, under_way_s: Iterable[float]) -> float:
        """The limit now. `under_way_s`: how long own generators have held their present leases."""
        return max(LEAST_S, TIMES * max([self._longest_s, *under_way_s]))
