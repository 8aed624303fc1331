"""Ages of the trained data: how many versions behind its tokens and trajectories were. Undone batches are left out."""

from collections import Counter
from dataclasses import dataclass, field

from tools.run import Line, skips_incomplete
from tools.surviving_history import span_pairs, trained_spans

EVENTS = ("trajectory", "term")


@dataclass(slots=True)
class Ages:
    """Takes the head's lines of EVENTS in order."""

    # step -> counts by age of all tokens, of trained ones, of trajectories by their oldest token
    _batches: dict[int, tuple[Counter[int], ...]] = field(default_factory=dict)

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        if line["event"] == "term":
            self._batches = {step: batch for step, batch in self._batches.items() if step < line["version"]}
            return
        clock, spans = int(line["clock"]), span_pairs(line["versions"])
        rest = trained_spans(spans, int(line["n_masked"]))
        counts = self._batches.setdefault(int(line["step"]), (Counter(), Counter(), Counter()))
        for count, pairs in zip(counts, (spans, rest, [(spans[0][0], 1)] if spans else []), strict=True):
            for version, n in pairs:
                count[clock - version] += n

    def _sum(self, place: int) -> Counter[int]:
        found = Counter[int]()
        for batch in self._batches.values():
            found.update(batch[place])
        return found

    def tokens(self) -> tuple[Counter[int], Counter[int]]:
        """Trained and masked tokens by age in versions."""
        trained = self._sum(1)
        return trained, self._sum(0) - trained

    def trajectories(self) -> Counter[int]:
        """Trajectories by the age of their oldest token, masked tokens included."""
        return self._sum(2)
