"""Sampled training tokens by what became of them (I12), and how long the samples were; knows no rule of the ring."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.audit.ages import Lengths
from tools.audit.prompts import Sample

KINDS = ("scored", "trained", "dropped")


@dataclass(slots=True)
class Tokens:
    """Of all terms together, but for `in_batches`: batches of the surviving history."""

    received: int = 0
    found: int = 0  # lost by a term, and found again by a later one, in its frontier
    in_batches: int = 0
    waiting: int = 0  # received, of prompts that are open at the last line
    dropped: Counter[str] = field(default_factory=Counter)  # by reason
    lengths: dict[str, Lengths] = field(default_factory=lambda: {kind: Lengths() for kind in KINDS})
    dropped_lengths: dict[str, Lengths] = field(default_factory=dict)  # by reason
    n_unscored: int = 0  # samples of refunded prompts that had no verdict yet

    def drop(self, samples: Iterable[Sample], reason: str) -> None:
        """Received, and never to be trained."""
        by_reason = self.dropped_lengths.setdefault(reason, Lengths())
        for sample in samples:
            self.dropped[reason] += sample.n_tokens
            self.lengths["dropped"].add(sample.n_tokens, sample.finish)
            by_reason.add(sample.n_tokens, sample.finish)

    @property
    def accounted(self) -> int:
        return self.in_batches + self.dropped.total() + self.waiting


@dataclass(slots=True)
class Undone:
    """What terms went back behind: work that is not in the surviving history."""

    updates: int = 0
    prompts: int = 0  # whose uids were given again
    trajectories: int = 0  # of batches
    tokens: int = 0  # of those trajectories
