"""Ages of the trained data: how many versions behind its tokens and trajectories were. Undone batches are left out."""

from collections import Counter
from dataclasses import dataclass, field

from tools.run import Line, skips_incomplete
from tools.surviving_history import span_pairs

EVENTS = ("trajectory", "term")


@dataclass(slots=True)
class _Batch:
    """Counts by age of one batch."""

    trained: Counter[int] = field(default_factory=Counter)  # tokens
    masked: Counter[int] = field(default_factory=Counter)  # tokens that are older than eta and not trained
    oldest: Counter[int] = field(default_factory=Counter)  # trajectories, by the age of their oldest token

    def add(self, line: Line) -> None:
        clock, left = int(line["clock"]), int(line["n_masked"])
        pairs = span_pairs(line["versions"])
        for version, n in pairs:  # versions never decrease (I5): the masked tokens come first
            masked = min(left, n)
            left -= masked
            if masked:
                self.masked[clock - version] += masked
            if n > masked:
                self.trained[clock - version] += n - masked
        if pairs:
            self.oldest[clock - pairs[0][0]] += 1


@dataclass(slots=True)
class Ages:
    """Takes the head's lines of EVENTS in order."""

    _batches: dict[int, _Batch] = field(default_factory=dict)  # by step

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        if line["event"] == "term":
            self._batches = {step: batch for step, batch in self._batches.items() if step < line["version"]}
        else:
            self._batches.setdefault(int(line["step"]), _Batch()).add(line)

    def tokens(self) -> tuple[Counter[int], Counter[int]]:
        """Trained and masked tokens by age in versions."""
        trained, masked = Counter[int](), Counter[int]()
        for batch in self._batches.values():
            trained.update(batch.trained)
            masked.update(batch.masked)
        return trained, masked

    def trajectories(self) -> Counter[int]:
        """Trajectories by the age of their oldest token, masked tokens included."""
        found = Counter[int]()
        for batch in self._batches.values():
            found.update(batch.oldest)
        return found
