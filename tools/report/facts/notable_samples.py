"""Which samples are worth reading: the slowest ones, and the rewards that differ most within a group."""

import heapq
import re
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from tools.run import Line, Run, is_number, parse, skips_incomplete
from tools.surviving_history import Key, sample_key

EVENTS = ("scored", "trajectory", "batch", "term", "check")
N_DISAGREEMENTS = 20  # of a second grader that are shown, the last ones
N_EACH = 5
NEEDED = frozenset({"evaluation", "version", "versions", "prompt", "completion"})  # of a sample that is shown
_IDS = re.compile(rb'"uid":(\d+),"sample":(\d+),"attempt":(\d+)')


@dataclass(frozen=True, slots=True, order=True)
class Notable:
    """One sample. Order: the most notable last; of equal ones the newest."""

    measure: float  # seconds, or how far the reward is from the others' mean
    step: int
    key: Key


@dataclass(slots=True)
class NotableSamples:
    """Takes the head's lines of EVENTS in order."""

    _slowest: list[Notable] = field(default_factory=list)  # heaps of N_EACH
    _better: list[Notable] = field(default_factory=list)
    _worse: list[Notable] = field(default_factory=list)
    _group: list[tuple[Key, float]] = field(default_factory=list)  # of the last trajectory line, with rewards
    _step: int = 0
    _n_scored: int = 0
    n_checked: int = 0  # samples with two grades
    n_unchecked: int = 0  # for which the second grader failed
    n_disagreements: int = 0
    disagreements: deque[Line] = field(default_factory=lambda: deque(maxlen=N_DISAGREEMENTS))

    @skips_incomplete
    def take(self, line: Line) -> None:
        """Take one line. A line without the fields of its event is ignored."""
        getattr(self, f"_on_{line['event']}")(line)

    def _on_scored(self, line: Line) -> None:
        if not line.get("evaluation") and is_number(line.get("seconds")):
            self._n_scored += 1
            _push(self._slowest, Notable(float(line["seconds"]), self._n_scored, sample_key(line)))

    def _on_batch(self, line: Line) -> None:
        self.end_group()

    def _on_term(self, line: Line) -> None:
        self.end_group()
        for heap in (self._better, self._worse):
            heap[:] = [one for one in heap if one.step < line["version"]]

    def _on_check(self, line: Line) -> None:
        self.n_checked += line["status"] == "value"
        self.n_unchecked += line["status"] != "value"
        if line.get("agrees") is False:
            self.n_disagreements += 1
            self.disagreements.append(line)

    def _on_trajectory(self, line: Line) -> None:
        """A batch has its trajectories group by group."""
        key = sample_key(line)
        if self._group and (self._group[0][0][0] != key[0] or self._step != line["step"]):
            self.end_group()
        self._step = int(line["step"])
        if is_number(line["reward"]):
            self._group.append((key, float(line["reward"])))

    def end_group(self) -> None:
        n, total = len(self._group), sum(reward for _, reward in self._group)
        for key, reward in self._group if n > 1 else ():
            gap = reward - (total - reward) / (n - 1)
            if abs(gap) > 1e-9:
                _push(self._better if gap > 0 else self._worse, Notable(abs(gap), self._step, key))
        self._group = []

    def slowest(self) -> list[Notable]:
        return sorted(self._slowest, reverse=True)

    def better(self) -> list[Notable]:
        """Rewards far above those of the same prompt."""
        return sorted(self._better, reverse=True)

    def worse(self) -> list[Notable]:
        """Rewards far below those of the same prompt."""
        return sorted(self._worse, reverse=True)


def _push(heap: list[Notable], one: Notable) -> None:
    """Keep the N_EACH most notable ones, one of each prompt."""
    same = next((other for other in heap if other.key[0] == one.key[0]), None)
    if same is not None:
        if one > same:
            heap[heap.index(same)] = one
            heapq.heapify(heap)
    elif len(heap) < N_EACH:
        heapq.heappush(heap, one)
    else:
        heapq.heappushpop(heap, one)


def texts_of(where: Run, wanted: Collection[Key]) -> dict[Key, Line]:
    """The logged samples with these ids; the last line of a sample counts. One pass that parses only those."""
    path = where.folder / "samples" / "samples.jsonl"
    if not wanted or not path.is_file():
        return {}
    with path.open("rb") as file:
        return _matching(file, wanted)


def _matching(lines: Iterable[bytes], wanted: Collection[Key]) -> dict[Key, Line]:
    found: dict[Key, Line] = {}
    for raw in lines:
        ids = _IDS.search(raw, 0, 400)
        if ids is None or (key := (int(ids[1]), int(ids[2]), int(ids[3]))) not in wanted:
            continue
        try:
            sample = parse(raw)
        except ValueError:
            continue  # torn: the writer was killed, or writes on
        if isinstance(sample, dict) and sample.keys() >= NEEDED and not sample["evaluation"]:
            found[key] = sample
    return found
