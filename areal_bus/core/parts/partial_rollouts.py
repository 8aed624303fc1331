"""Unfinished samples that generators reported, so that they can be leased again, also after a restart of the head.

A restarted head knows prompts and verdicts, but no leases. Generators offer it their unfinished samples when the next
term has begun, so that these are not lost.

The newest report of each sample is kept until the sample is scored, its prompt is refunded, its prompt is leased to a
generator that cannot continue it, or a new term invalidates it. The store is bounded in bytes and evicts the oldest
report first.
"""

from collections.abc import Iterable
from dataclasses import replace

from areal_bus.core.parts.head_checkpoint import newest
from areal_bus.core.parts.terms import TermHistory
from areal_bus.errors import ImpossibleEvent
from areal_bus.messages import Partial


class SampleOffers:
    """Unfinished samples of a generator from before its head restarted; none of a newer head is among them."""

    def __init__(self) -> None:
        self._held: list[Partial] = []
        self._timeline = TermHistory()

    def keep(self, held: Iterable[Partial], timeline: TermHistory) -> None:
        """`timeline`: the terms in which they were made. An empty `held` keeps the earlier ones."""
        if fresh := list(held):
            self._held, self._timeline = fresh, timeline

    def take(self, term: int, base: int) -> list[Partial]:
        """Return the samples that are valid in the term that begins at version `base`, and forget all."""
        held, self._held = self._held, []
        is_next = self._timeline.begin(term, base)
        return [partial for partial in held if is_next and self._timeline.keeps(newest(partial))]


RECORD_BYTES = 512  # of one report, beside its frames
SPAN_BYTES = 128


class PartialRollouts:
    """Reports by (uid, sample), oldest first."""

    def __init__(self, limit_bytes: int) -> None:
        self.n_bytes = 0
        self._limit_bytes = limit_bytes
        self._kept: dict[tuple[int, int], Partial] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, partial: Partial) -> None:
        """Store a report in place of an earlier one of the same sample."""
        self.drop(partial.uid, partial.sample)
        self._kept[partial.uid, partial.sample] = partial
        self.n_bytes += size(partial)
        while self.n_bytes > self._limit_bytes:  # I9
            self.drop(*next(iter(self._kept)))

    def drop(self, uid: int, sample: int) -> None:
        """Forget the report of a sample that ended."""
        partial = self._kept.pop((uid, sample), None)
        if partial is not None:
            self.n_bytes -= size(partial)

    def forget(self, uid: int, n_samples: int) -> None:
        """Forget all reports of a prompt that left."""
        for sample in range(n_samples):
            self.drop(uid, sample)

    def begin_term(self, version: int, open_: set[int]) -> None:
        """Keep the reports of open prompts whose tokens are all of surviving versions (I6)."""
        for key, partial in list(self._kept.items()):
            if partial.uid not in open_ or newest(partial) > version:
                self.drop(*key)

    def hand_on(self, uid: int, samples: list[int], *, attempt: int, version: int) -> list[Partial]:
        """The reports that a generator with `version` can continue, under this attempt. Forgets all others (I5)."""
        handed = []
        for sample in samples:
            partial = self._kept.get((uid, sample))
            if partial is None:
                continue
            if newest(partial) > version:
                self.drop(uid, sample)
                continue
            self._kept[uid, sample] = partial = replace(partial, attempt=attempt)
            handed.append(partial)
        return handed


def size(partial: Partial) -> int:
    """Approximate size in memory, in bytes."""
    return RECORD_BYTES + SPAN_BYTES * len(partial.spans) + len(partial.ids) + len(partial.logps)


def check_whole(partial: Partial) -> None:
    """Raises ImpossibleEvent unless it has one turn, at least one sampled token, and all ids."""
    is_one_turn = len(partial.segments) == 1 and min(partial.segments[0]) > 0
    if not is_one_turn or len(partial.ids) != 4 * sum(partial.segments[0]):
        found = f"its segments are {partial.segments[:4]}, its ids {len(partial.ids) // 4}"
        raise ImpossibleEvent(f"a partial rollout has one turn with at least one token: {found}")
