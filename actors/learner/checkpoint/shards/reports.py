"""How the ranks conclude a checkpoint, on their writer threads: reports in the store of rank 0, no collective."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from actors.learner.checkpoint.shards.tensor_file import FileRecord
from areal_bus.errors import CheckpointError

POLL_S = 0.05
TIMEOUT_S = 1800.0  # until the slowest rank has written its part

Files = Mapping[str, FileRecord]


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the ranks conclude one checkpoint."""

    index: int  # of this rank
    size: int
    number: int  # of the checkpoint
    store: Store | None  # of rank 0; None for a single rank


@dataclass(frozen=True, slots=True)
class RankReport:
    """What a rank wrote, by path in the checkpoint; or why it could not."""

    files: Files
    error: str = ""

    def to_json(self) -> str:
        files = {name: [record.n_bytes, record.sha256] for name, record in self.files.items()}
        return json.dumps({"files": files, "error": self.error})

    @staticmethod
    def from_json(text: str) -> "RankReport":
        found: dict[str, Any] = json.loads(text)
        return RankReport({name: FileRecord(*record) for name, record in found["files"].items()}, found["error"])


def conclude(meeting: Meeting, mine: RankReport, seal: Callable[[Files], None], give_up: Callable[[], None]) -> None:
    """Rank 0 seals what all ranks wrote, or gives up; the others return when it has.

    Raises CheckpointError, on every rank, when one of them could not write or did not report.
    """
    if meeting.index == 0:
        error = _conclude_as_root(meeting, mine, seal, give_up)
    else:
        store = _store(meeting)
        store.set(str(meeting.index), mine.to_json())
        error = _wait(store, "word", "rank 0")
    if error:
        raise CheckpointError(error)


def _conclude_as_root(
    meeting: Meeting, mine: RankReport, seal: Callable[[Files], None], give_up: Callable[[], None]
) -> str:
    store = _store(meeting) if meeting.size > 1 else None
    error = "rank 0 could not conclude it"
    try:
        reports = [mine, *_collect(store, meeting.size)]
        errors = [f"rank {i}: {r.error}" if meeting.size > 1 else r.error for i, r in enumerate(reports) if r.error]
        if not errors:
            seal({name: record for report in reports for name, record in report.files.items()})
        error = "; ".join(errors)
    except CheckpointError as found:
        error = str(found)
    except Exception:
        _announce(store, error, give_up)
        raise
    _announce(store, error, give_up)
    return error


def _announce(store: Store | None, error: str, give_up: Callable[[], None]) -> None:
    if error:
        give_up()
    if store is not None:
        store.set("word", error)


def _collect(store: Store | None, n_ranks: int) -> list[RankReport]:
    """Of all ranks but the first."""
    if store is None:
        return []
    return [RankReport.from_json(_wait(store, str(index), f"rank {index}")) for index in range(1, n_ranks)]


def _store(meeting: Meeting) -> Store:
    if meeting.store is None:
        raise CheckpointError("missing store: several ranks need one to conclude a checkpoint")
    return PrefixStore(f"checkpoint/{meeting.number}", meeting.store)


def _wait(store: Store, key: str, who: str) -> str:
    """The value, once it is set. Raises CheckpointError."""
    deadline = time.monotonic() + TIMEOUT_S
    try:
        while not store.check([key]):
            if time.monotonic() > deadline:
                raise CheckpointError(f"{who} has not reported its part of a checkpoint for {TIMEOUT_S:g} s")
            time.sleep(POLL_S)
        return store.get(key).decode()
    except RuntimeError as error:  # the store has ended, and so does this rank
        raise CheckpointError(f"{who} is gone: {error}") from error
