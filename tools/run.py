"""Finds a run's folder and reads its files: journal lines, samples, settings and summary."""

import contextlib
import functools
import heapq
import json
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import read_object
from areal_bus.storage.journal import SCHEMA
from areal_bus.storage.journal_segments import NAME as JOURNAL_FILE
from areal_bus.storage.journal_segments import raw_lines

LATEST = Path("runs/latest")
MARK = b'"event":"'  # quotes in texts are escaped, so the first match is the event

Line = dict[str, Any]
EARLIER = re.compile(r"config-[0-9]+\.json")  # of a start before the last one
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """One run folder. Every call reads the files again, so a running job can be read at any time."""

    folder: Path

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    def config(self) -> Line:
        """The resolved config as plain JSON; {} when the run has none."""
        return read_object(self.folder / "config.json")

    def earlier_configs(self) -> list[Line]:
        """The configs of starts before the last one, in no order."""
        return [read_object(path) for path in self.folder.glob("config-*.json") if EARLIER.fullmatch(path.name)]

    def origin(self) -> Line:
        """Config file and folders of the run's start; {} if not recorded."""
        return read_object(self.folder / "origin.json")

    def summary(self) -> Line:
        """The head's summary at the end; {} before the end."""
        return read_object(self.folder / "summary.json")

    def journals(self, role: str | None = None) -> list[Path]:
        """The first journal file of each process (of one role), in order; read it by `lines`, which decompresses."""
        folder, found = journal_folder(self.folder), set()
        for name in os.listdir(folder) if folder.is_dir() else ():
            match = JOURNAL_FILE.fullmatch(name)
            if match is not None and role in (None, match["role"]):
                first = folder / f"{match['journal']}.jsonl"
                found.add((match["role"], int(match["rank"]), int(match["inc"]), first))
        return [path for *_, path in sorted(found)]

    def events(self, *names: str, role: str | None = None) -> Iterator[Line]:
        """Lines of all processes, merged by wall time; each file keeps its order. Without `names`: all events."""
        each = [lines(path, *names) for path in self.journals(role)]
        return heapq.merge(*each, key=lambda line: float(line.get("wall", 0.0)))

    def samples(self) -> Iterator[Line]:
        """All logged samples, in the order of writing."""
        return _read_if_exists(self.folder / "samples" / "samples.jsonl")

    def tokens(self) -> Iterator[Line]:
        """The logged tokens of all samples, in the order of writing."""
        return _read_if_exists(self.folder / "samples" / "tokens.jsonl")


def find(argument: str | None) -> Run:
    """The run of a command line: a folder, a name below runs/, or (None) the latest. Raises ConfigError."""
    folder = LATEST if argument is None else Path(argument)
    if argument is not None and not folder.exists() and (LATEST.parent / argument).is_dir():
        folder = LATEST.parent / argument
    if not folder.is_dir():
        fix = "name a run's folder" if argument is None else "give the path of a run's folder (or its name below runs/)"
        raise ConfigError(f"missing run folder: {folder} does not exist; {fix}")
    run = Run(folder)
    if (journal := journal_folder(folder)).is_dir():
        os.listdir(journal)  # a glob takes a folder without permission for an empty one
    if not run.journals():
        raise ConfigError(f"missing journal: {journal_folder(folder)} has no ROLE-RANK.INC.jsonl")
    for path in run.journals():
        check_schema(next(lines(path), {}), path)
    return run


def check_schema(line: Line, path: Path) -> None:
    """Raises ConfigError when a start line announces a schema that this version does not read."""
    schema = line.get("schema", SCHEMA)
    if schema != SCHEMA:
        raise ConfigError(f"this version reads journals of schema {SCHEMA}: {path} has schema {schema!r}")


def starting(argument: str | None) -> Run:
    """The folder of a job that starts: it may have no journal yet."""
    if argument is None or not Path(argument).is_dir():
        raise ConfigError(f"--until-eof needs the folder of a run: got {argument}")
    return Run(Path(argument))


def journal_folder(folder: Path) -> Path:
    """The run's journal folder: journal/ in the run's folder, or journal.dir of its config."""
    named = read_object(folder / "config.json").get("journal", {}).get("dir", "")
    return Path(named) if named else folder / "journal"


def lines(path: Path, *names: str) -> Iterator[Line]:
    """The lines of one process, in order, from all its files. With `names` only those events are parsed."""
    for line in _objects(raw_lines(path), path, frozenset(name.encode() for name in names)):
        if not names or line.get("event") in names:
            yield line


def _read_if_exists(path: Path) -> Iterator[Line]:
    if path.is_file():
        with path.open("rb") as file:
            yield from _objects(file, path, frozenset())


def parse(raw: bytes) -> Any:
    """The JSON value of a line. Raises ValueError. pydantic's parser is faster; `json` takes half a surrogate pair."""
    try:
        return from_json(raw)
    except ValueError:
        try:
            return json.loads(raw)
        except RecursionError:
            raise ValueError("too many levels of lists and objects") from None


def event_of(raw: bytes) -> bytes:
    """The event of a journal line that is not parsed yet; b"" if it has none."""
    return raw.partition(MARK)[2].partition(b'"')[0]


def _objects(raws: Iterable[bytes], path: Path, wanted: frozenset[bytes]) -> Iterator[Line]:
    """JSON objects of lines that were read from `path`. With `wanted` only lines of these events.

    A torn last line, which a killed writer leaves, is skipped silently.
    Any other broken line, or a line whose `wall` is not a number, is skipped with a message on standard error.
    """
    broken: int | None = None
    for number, raw in enumerate(raws, start=1):
        if broken is not None:
            print(f"{path}: skipped line {broken}, which is broken", file=sys.stderr)
            broken = None
        if wanted and raw.endswith(b"}\n") and (event := event_of(raw)) and event not in wanted:
            continue
        try:
            value = parse(raw) if raw.endswith(b"\n") else None
        except ValueError:
            value = None
        if isinstance(value, dict) and is_number(value.get("wall", 0.0)):
            yield value
        elif raw.strip():
            broken = number


def skips_incomplete(take: Callable[[T, Line], None]) -> Callable[[T, Line], None]:
    """Let a method that takes a line ignore one whose fields are missing or of another type: an older version."""

    @functools.wraps(take)
    def take_if_complete(self: T, line: Line) -> None:
        with contextlib.suppress(KeyError, TypeError, ValueError):
            take(self, line)

    return take_if_complete


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
