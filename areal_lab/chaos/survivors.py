"""The surviving history of a run: each term discards the work after its starting point. Pure."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from tools.run import Line


@dataclass
class Survivors:
    """What is left of prompts, samples and updates."""

    admitted: set[int] = field(default_factory=set)
    trained: dict[int, int] = field(default_factory=dict)  # uid -> step
    refunded: set[int] = field(default_factory=set)
    samples: Counter[tuple[int, int]] = field(default_factory=Counter)  # (uid, sample) -> times trained
    updates: dict[int, float] = field(default_factory=dict)  # version -> when it was reported
    n_undone: int = 0  # updates that a term has discarded

    @staticmethod
    def of(lines: Iterable[Line]) -> "Survivors":
        found = Survivors()
        for line in lines:
            found.take(line)
        return found

    @property
    def lost(self) -> set[int]:
        """Prompts that are neither trained nor refunded, at an orderly end."""
        return self.admitted - self.trained.keys() - self.refunded

    @property
    def twice(self) -> list[tuple[int, int]]:
        return [sample for sample, n in self.samples.items() if n > 1]

    def take(self, line: Line) -> None:
        match line["event"]:
            case "admit":
                self.admitted.add(line["uid"])
            case "refund":
                self.refunded.add(line["uid"])
            case "trajectory":
                self.trained[line["uid"]] = line["step"]
                self.samples[line["uid"], line["sample"]] += 1
            case "update":
                self.updates[line["version"]] = line["t"]
            case "term":
                self._go_back(line)

    def _go_back(self, line: Line) -> None:
        version, is_open = line["version"], set(line["open"])
        self.trained = {uid: step for uid, step in self.trained.items() if step < version}
        self.samples = Counter({x: n for x, n in self.samples.items() if x[0] in self.trained})
        self.admitted = {uid for uid in self.admitted if uid < line["next_uid"]}
        self.refunded = {uid for uid in self.refunded if uid < line["next_uid"]} - is_open
        undone = [later for later in self.updates if later > version]
        self.n_undone += len(undone)
        for later in undone:
            del self.updates[later]
        if version and line.get("lives_on"):
            self.updates.setdefault(version, line["t"])  # the head before died before it reported this update
