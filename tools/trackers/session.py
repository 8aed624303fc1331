"""Feeds one tracker from the journal, over several starts, without writing a step twice."""

import contextlib
import fcntl
import json
import secrets
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from areal_bus.config.names.trackers import check_members, check_trackers, constructor_of
from areal_bus.errors import ConfigError
from areal_bus.storage.atomic_file import read_object, write_atomic
from tools.audit import run_settings
from tools.follow import JournalFollower
from tools.run import Line, Run, is_number, parse
from tools.samples import interleave_groups
from tools.trackers.protocol import Target, Writer
from tools.trackers.series import EVENTS, Row, SeriesReader, Undone

SAMPLES = 8  # of the newest step
SAMPLES_EVERY_S = 60.0
TAIL_BYTES = 1 << 18  # of samples.jsonl


@dataclass(slots=True)
class TrackerState:
    """What earlier starts wrote; kept in OUT/TRACKER.json."""

    identity: str
    last: dict[str, int] = field(default_factory=dict)  # newest step of each key of a row

    @property
    def first_step(self) -> int:
        return max(self.last.values(), default=-1) + 1


class TrackerSession:
    """One tracker run. `advance` reads further lines of the journal and writes the new rows."""

    def __init__(self, where: Run, tracker: str, folder: Path, state_file: Path, state: TrackerState) -> None:
        self._where, self._state_file = where, state_file
        self._journal = JournalFollower(where, EVENTS)
        self._series = SeriesReader(run_settings.read(where.config(), where.earlier_configs()))
        make: Callable[[Target], Writer] = constructor_of(tracker)
        self._writer = make(Target(where.name, folder, where.config(), state.identity, state.first_step))
        check_members(tracker, self._writer)
        self._state = TrackerState(state.identity) if self._writer.is_rewritten else state
        self._samples_due = 0.0 if self._writer.takes_samples else float("inf")
        self._sampled_version = -1
        self.n_rows = 0

    def advance(self, until: float, now: float) -> None:
        """Write the rows of the lines with a wall time up to `until`; samples at most once a minute of `now`."""
        rows: list[Row] = []
        for line in self._journal.read(until):
            for item in self._series.take(line):
                if isinstance(item, Row):
                    rows.append(item)
                elif self._writer.takes_undo:
                    self._write(rows)
                    rows = []
                    self._undo(item)
        self._write(rows)
        if rows and now >= self._samples_due:
            self.write_samples()
            self._samples_due = now + SAMPLES_EVERY_S

    def write_samples(self) -> None:
        """Write some samples of the newest step, if the tracker takes samples and the run keeps them."""
        samples = newest_samples(self._where) if self._writer.takes_samples else []
        if samples and self.n_rows and samples[0]["version"] != self._sampled_version:
            self._sampled_version = samples[0]["version"]
            self._writer.samples(int(self._sampled_version), samples)

    def close(self) -> None:
        self._writer.close()

    def _write(self, rows: list[Row]) -> None:
        """Write rows that no earlier start wrote. Without undo the state is saved first, so a crash repeats no step."""
        new = []
        for row in rows:
            if row.step > self._state.last.get(row.key, -1):
                self._state.last[row.key] = row.step
                new.append(row)
        if not new:
            return
        if not self._writer.takes_undo:
            self._save()
        self._writer.write(new)
        if self._writer.takes_undo:
            self._save()
        self.n_rows += len(new)

    def _undo(self, undone: Undone) -> None:
        if any(step > undone.version for step in self._state.last.values()):
            self._writer.undo(undone.version)
            self._state.last = {key: min(step, undone.version) for key, step in self._state.last.items()}
            self._save()

    def _save(self) -> None:
        write_atomic(self._state_file, json.dumps(asdict(self._state)))


@contextlib.contextmanager
def open_session(where: Run, tracker: str, out: Path, *, new: bool) -> Iterator[TrackerSession]:
    """The session of a tracker. `new` begins another tracker run. Raises ConfigError when it cannot be opened."""
    if (own := where.origin().get("folder")) and own not in sys.path:
        sys.path.insert(0, str(own))  # of the config: a writer of the user's own is beside it
    check_trackers([tracker])
    name = tracker.replace(":", "-")  # of the user's own
    folder, state_file = out / name, out / f"{name}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (out / f"{name}.lock").open("w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot open the folder of the tracker: {error}; choose another one by --out") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(f"one process at a time writes a tracker run: another one writes {folder}") from None
        state = _load(state_file, new=new)
        session = TrackerSession(where, tracker, folder, state_file, state)
        try:
            yield session
        finally:
            session.close()


def _load(file: Path, *, new: bool) -> TrackerState:
    stored = {} if new else read_object(file)
    last = stored.get("last", {})
    if not stored:
        return TrackerState(secrets.token_hex(4))
    if not isinstance(stored.get("identity"), str) or not all(isinstance(step, int) for step in last.values()):
        raise ConfigError(f"{file} must hold the state of a tracker; remove it, or use --new to begin another run")
    return TrackerState(stored["identity"], last)


def newest_samples(where: Run) -> list[Line]:
    """Some samples of the newest trained step, from the end of the file; [] if the run keeps none."""
    try:
        with (where.folder / "samples" / "samples.jsonl").open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            pieces = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    except FileNotFoundError:
        return []
    found: list[Line] = []
    for piece in reversed(pieces):
        sample = _sample(piece)
        if sample is None or sample.get("evaluation"):
            continue
        if found and sample.get("step") != found[0].get("step"):
            break
        found.append(sample)
    return interleave_groups(found[::-1])[:SAMPLES]


def _sample(piece: bytes) -> Line | None:
    try:
        value = parse(piece)
    except ValueError:
        print("skipped a broken line of samples.jsonl", file=sys.stderr)
        return None
    has_version = isinstance(value, dict) and is_number(value.get("version"))
    return value if has_version and {"step", "uid", "completion"} <= value.keys() else None
