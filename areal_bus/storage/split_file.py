"""RUN/split.json: the split of ranks that holds now. The head writes it; supervisors, and a restarted head, read it.

{"pool": {...}, "learners": 2, "generators": 3, "number": 1, "since": 40}: a `RankPool` and the fields of a `Split`.
"""

import json
from dataclasses import asdict
from pathlib import Path

from areal_bus.core.parts.split import RankPool, Split
from areal_bus.errors import CheckpointError
from areal_bus.storage.atomic_file import write_atomic

FILE = "split.json"


def write(run: Path, pool: RankPool, split: Split) -> None:
    """Replace the file atomically and durably. Raises CheckpointError."""
    path = run / FILE
    try:
        write_atomic(path, json.dumps({"pool": asdict(pool)} | asdict(split)) + "\n")
    except OSError as error:
        raise CheckpointError(
            f"cannot write the split to {path}: {error}; it must be on disk before the change begins"
        ) from error


def read(run: Path) -> tuple[RankPool, Split] | None:
    """The ranks that may change, and their split; None without the file. Raises CheckpointError when it is damaged."""
    path = run / FILE
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return RankPool(**fields.pop("pool")), Split(**fields)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(f"the split of ranks must be readable: {path}: {error}") from error


def remove(run: Path) -> None:
    """A start whose split is fixed has no such file."""
    (run / FILE).unlink(missing_ok=True)
