"""RUN/best.json: the values of evaluate.metric by version. The head writes it, and the learner keeps those checkpoints.

RUN/best is a link to the model of the best checkpoint.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from areal_bus.storage import versioned_dirs
from areal_bus.storage.atomic_file import write_atomic

FILE = "best.json"
LINK = "best"

Values = Sequence[tuple[int, float]]  # (version, value); larger is better


@dataclass(frozen=True, slots=True)
class BestRule:
    """Which checkpoints stay because of their evaluation: `keep` of them; every multiple of `every` is evaluated."""

    keep: int
    every: int

    @property
    def is_on(self) -> bool:
        return self.keep > 0 and self.every > 0

    def is_due(self, version: int) -> bool:
        """Whether this version is evaluated, so that its checkpoint may be the best."""
        return self.is_on and version > 0 and version % self.every == 0

    def best(self, values: Values) -> list[int]:
        """The best versions, best first; of equal values the oldest."""
        ordered = sorted(values, key=lambda found: (-found[1], found[0]))
        return [version for version, _ in ordered[: self.keep]]

    def keeps(self, version: int, values: Values) -> bool:
        """Whether the checkpoint of this version stays: one of the best, or not evaluated yet.

        The model before training, version 0, takes no place: it is where it was.
        """
        values = [(evaluated, value) for evaluated, value in values if evaluated]
        newest = max((evaluated for evaluated, _ in values), default=0)
        return self.is_on and (version in self.best(values) or (self.is_due(version) and version > newest))


def write(run: Path, metric: str, values: Values) -> None:
    """Write the values, and point RUN/best to the best version that has a checkpoint. Raises OSError."""
    write_atomic(run / FILE, json.dumps({"metric": metric, "values": list(values)}) + "\n")
    for version in BestRule(len(values), 1).best(values):
        model = versioned_dirs.place(run / "checkpoints", version) / "model"
        if model.is_dir():
            versioned_dirs.link(run / LINK, model)
            return


def read(run: Path) -> list[tuple[int, float]]:
    """The values; none where there is no such file, or none that can be read."""
    try:
        values = json.loads((run / FILE).read_text(encoding="utf-8"))["values"]
        return [(int(version), float(value)) for version, value in values]
    except (OSError, ValueError, TypeError, KeyError):
        return []
