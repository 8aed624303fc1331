"""Effects: the decisions of the head, as records. The shell (`actors/head/shell.py`) carries them out in order."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, HeadSavepoint
from areal_bus.core.parts.split import Split


@dataclass(frozen=True, slots=True)
class Send:
    """Effect: a message to a member."""

    to: str
    message: m.Message


@dataclass(frozen=True, slots=True)
class Record:
    """Effect: a line for the journal."""

    event: Event
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Keep:
    """Effect: write a sample to the sample log. `clock` is c for a trained sample, the version for an evaluated one."""

    scored: m.Scored
    step: int | None
    clock: int
    n_masked: int
    source: str = ""  # name of its [[data.source]]
    row: str = ""  # its row as JSON


@dataclass(frozen=True, slots=True)
class Progress:
    """Effect: a console line. `kind` is "step", "evaluation", "phase", "note", "warning" or "late" (debug level)."""

    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class End:
    """Effect: the job is over; code 0 is success."""

    code: int
    sentence: str


@dataclass(frozen=True, slots=True)
class Save:
    """Effect: write this head checkpoint atomically. A checkpoint is complete with both this and the learner's part."""

    checkpoint: HeadCheckpoint


@dataclass(frozen=True, slots=True)
class Mark:
    """Effect: write this savepoint before the effects that follow. The two newest are kept."""

    savepoint: HeadSavepoint


@dataclass(frozen=True, slots=True)
class Divide:
    """Effect: write this head checkpoint, then this split, before the effects that follow (docs/adapt.md)."""

    split: Split
    checkpoint: HeadCheckpoint


@dataclass(frozen=True, slots=True)
class EvictForGood:
    """Effect: write for the next head which generators are evicted for good, before the effects that follow."""

    generators: tuple[int, ...]  # all of them, by index


@dataclass(frozen=True, slots=True)
class Discard:
    """Effect: delete the head checkpoints of these versions."""

    versions: tuple[int, ...]


Effect = Send | Record | Keep | Progress | Save | Mark | Divide | EvictForGood | Discard | End


class Effects:
    """Collects effects in order."""

    def __init__(self) -> None:
        self._out: list[Effect] = []
        self.on_record: Callable[[Event, Mapping[str, Any]], None] | None = None  # is called with every journal line

    def send(self, to: str, message: m.Message) -> None:
        self._out.append(Send(to, message))

    def record(self, event: Event, **fields: Any) -> None:
        self._out.append(Record(event, fields))
        if self.on_record is not None:
            self.on_record(event, fields)

    def progress(self, kind: str, **fields: Any) -> None:
        self._out.append(Progress(kind, fields))

    def keep(
        self, scored: m.Scored, *, step: int | None, clock: int, n_masked: int, source: str = "", row: str = ""
    ) -> None:
        self._out.append(Keep(scored, step, clock, n_masked, source, row))

    def save(self, checkpoint: HeadCheckpoint) -> None:
        self._out.append(Save(checkpoint))

    def mark(self, savepoint: HeadSavepoint) -> None:
        self._out.append(Mark(savepoint))

    def divide(self, split: Split, checkpoint: HeadCheckpoint) -> None:
        self._out.append(Divide(split, checkpoint))

    def evict_for_good(self, generators: Iterable[int]) -> None:
        self._out.append(EvictForGood(tuple(sorted(generators))))

    def discard(self, versions: Iterable[int]) -> None:
        if gone := tuple(versions):
            self._out.append(Discard(gone))

    def end(self, code: int, sentence: str) -> None:
        self._out.append(End(code, sentence))

    def take(self) -> list[Effect]:
        out, self._out = self._out, []
        return out
