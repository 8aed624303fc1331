"""Small files of a run that the head writes: RUN/split.json, best.json, term.json and rollback.json.

split.json is the split of ranks that holds now; supervisors, and a restarted head, read it. {"pool": {...},
"learners": 2, "generators": 3, "number": 1, "since": 40}: a `RankPool` and the fields of a `Split`. best.json has the
values of evaluate.metric by version; the learner keeps those checkpoints, and RUN/best is a link to the model of the
best one.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from areal_bus.core.parts.collapse import Rollback
from areal_bus.core.parts.split import RankPool, Split
from areal_bus.errors import CheckpointError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.atomic_file import write_atomic

SPLIT = "split.json"
ROLLBACK = "rollback.json"
TERM_FILE = "term.json"


def write_rollback(run: Path, order: Rollback) -> None:
    """Write the order durably, before a learner obeys it. Raises OSError."""
    write_atomic(run / ROLLBACK, json.dumps(asdict(order)) + "\n")


def read_rollback(run: Path) -> Rollback | None:
    """The rollback that the run has ordered; None without the file. Raises CheckpointError when it is damaged."""
    path = run / ROLLBACK
    try:
        return Rollback(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"unreadable order of a rollback: {path}: {error}; remove it to go on without") from error


def open_rollback(run: Path) -> Rollback | None:
    """The rollback that no term has obeyed yet. Raises CheckpointError for a damaged file."""
    order = read_rollback(run)
    return order if order is not None and order.is_open(next_term(run)) else None


def write_split(run: Path, pool: RankPool, split: Split) -> None:
    """Replace the file atomically and durably. Raises CheckpointError."""
    path = run / SPLIT
    try:
        write_atomic(path, json.dumps({"pool": asdict(pool)} | asdict(split)) + "\n")
    except OSError as error:
        raise CheckpointError(f"the split must be on disk before a change begins: {path}: {error}") from error


def read_split(run: Path) -> tuple[RankPool, Split] | None:
    """The ranks that may change, and their split; None without the file. Raises CheckpointError when it is damaged."""
    path = run / SPLIT
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RankPool(**fields.pop("pool")), Split(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the split of ranks must be readable: {path}: {error}") from error


BEST = "best.json"
BEST_LINK = "best"

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
        """Whether this version's checkpoint stays: one of the best, or not evaluated yet; version 0 takes no place."""
        values = [(evaluated, value) for evaluated, value in values if evaluated]
        newest = max((evaluated for evaluated, _ in values), default=0)
        return self.is_on and (version in self.best(values) or (self.is_due(version) and version > newest))


def write_best(run: Path, metric: str, values: Values) -> None:
    """Write the values, and point RUN/best to the best version that has a checkpoint. Raises OSError."""
    write_atomic(run / BEST, json.dumps({"metric": metric, "values": list(values)}) + "\n")
    for version in BestRule(len(values), 1).best(values):
        model = versioned_dirs.place(run / "checkpoints", version) / "model"
        if model.is_dir():
            versioned_dirs.link(run / BEST_LINK, model)
            return


def read_best(run: Path) -> list[tuple[int, float]]:
    """The values; none where there is no such file, or none that can be read."""
    try:
        values = json.loads((run / BEST).read_text(encoding="utf-8"))["values"]
        return [(int(version), float(value)) for version, value in values]
    except (OSError, ValueError, TypeError, KeyError):
        return []


def next_term(folder: Path) -> int:
    """The first term of this incarnation of the head: one above the newest term of this run, from 0.

    Raises CheckpointError for an unreadable file: a guess that is too small would revive a lost term.
    """
    path = folder / TERM_FILE
    try:
        newest = json.loads(path.read_text(encoding="utf-8"))["term"]
        if type(newest) is int and newest >= 0:
            return newest + 1
        why = f"its term is {newest!r}"
    except FileNotFoundError:
        return 0
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
    remedy = 'write it with the largest "term" of the head\'s journal (head-*.jsonl), or a larger one, and resume'
    raise CheckpointError(f'{path} must hold {{"term": N}}, the newest term of this run: {why}; {remedy}')
