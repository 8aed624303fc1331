"""Writes and reads head checkpoints and savepoints on disk, atomically and without pickle.

RUN/frontiers/frontier-000010 has a JSON line {"schema", "bytes", "sha256"} about the rest, a JSON line with the
checkpoint, and its scored trajectories as wire messages (each frame preceded by its length in four bytes).
RUN/frontiers/waypoint-0 and -1 are the two newest savepoints in the same format. They are not synced: a savepoint
belongs to a running learner, which does not survive a crash of the machine either.
"""

import contextlib
import hashlib
import json
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, HeadSavepoint, OpenPrompt
from areal_bus.core.parts.terms import slot
from areal_bus.core.rows import IssuedRow, Row
from areal_bus.errors import CheckpointError, WireError
from areal_bus.messages import Scored
from areal_bus.storage.atomic_file import sync
from areal_bus.wire import codec

SCHEMA = 1
PREFIX = "frontier-"
NAME = re.compile(rf"{PREFIX}([0-9]{{6}}|[1-9][0-9]{{6,}})")  # any other name is a copy, or a stranger's
WAYPOINT = "waypoint-"
WAYPOINTS = f"{WAYPOINT}[01]"
JOB = "frontier"
LENGTH = struct.Struct("<I")
DAMAGE = (OSError, ValueError, KeyError, TypeError, struct.error, WireError)  # raised by reading a damaged file


def path_of(folder: Path, version: int) -> Path:
    """Path of the checkpoint of `version`; `folder` is RUN/frontiers."""
    return folder / f"{PREFIX}{version:06d}"


def save(path: Path, checkpoint: HeadCheckpoint) -> None:
    """Write under a temporary name, sync, rename. Raises OSError, and then leaves `path` untouched."""
    _write(path, checkpoint, {}, syncs=True)
    sync(path.parent)


def mark(folder: Path, waypoint: HeadSavepoint) -> None:
    """Write a savepoint atomically (but for a crash of the machine). Raises OSError, with the old file deleted."""
    path = folder / f"{WAYPOINT}{slot(waypoint)}"
    try:
        _write(path, waypoint.checkpoint, {"root": waypoint.root}, syncs=False)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def waypoints(folder: Path) -> list[HeadSavepoint]:
    found = []
    for path in sorted(folder.glob(WAYPOINTS)):
        try:
            about, body = _read(path)
            found.append(HeadSavepoint(about["root"], _unpack(body)))
        except DAMAGE:
            continue
    return found


def drop_waypoints(folder: Path) -> None:
    """Delete all savepoints, as far as possible."""
    for path in folder.glob(WAYPOINTS):
        with contextlib.suppress(OSError):
            path.unlink()


def _write(path: Path, checkpoint: HeadCheckpoint, further: dict[str, str], *, syncs: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    body = b"".join(_pack(checkpoint))
    about = {"schema": SCHEMA, "bytes": len(body), "sha256": hashlib.sha256(body).hexdigest(), **further}
    building = path.with_name(f".{path.name}.tmp")  # each has one writer
    try:
        with building.open("wb") as file:
            file.write(json.dumps(about).encode() + b"\n")
            file.write(body)
            file.flush()
            if syncs:
                os.fsync(file.fileno())
        building.replace(path)
    finally:
        building.unlink(missing_ok=True)


def discard(path: Path) -> None:
    """Delete it if it exists, and sync. Raises OSError."""
    if path.exists():
        path.unlink()
        sync(path.parent)


def load(path: Path) -> HeadCheckpoint:
    """Raises CheckpointError when the file is missing, incomplete or damaged."""
    try:
        return _unpack(_read(path)[1])
    except DAMAGE as error:
        raise CheckpointError(f"unreadable head checkpoint: {path}: {error}") from error


def usable(folder: Path) -> list[int]:
    """Versions with a complete checkpoint in RUN/frontiers, newest first."""
    found = []
    for version in reversed(versions(folder)):
        try:
            load(path_of(folder, version))
        except CheckpointError:
            continue
        found.append(version)
    return found


def versions(folder: Path) -> list[int]:
    """Versions of all checkpoint files, complete or not."""
    return sorted(int(found[1]) for path in folder.glob(f"{PREFIX}*") if (found := NAME.fullmatch(path.name)))


def tidy(folder: Path) -> None:
    """Remove temporary files of a head that was killed."""
    for path in folder.glob(".*.tmp"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, Any], bytes]:
    """The first line and the rest, after checking size and SHA-256."""
    with path.open("rb") as file:
        about = json.loads(file.readline(1 << 12))
        if about["schema"] != SCHEMA:
            raise ValueError(f"its schema must be {SCHEMA}; got {about['schema']}")
        body = file.read()
    if len(body) != about["bytes"] or hashlib.sha256(body).hexdigest() != about["sha256"]:
        raise ValueError("its size or SHA-256 differs from its first line")
    return about, body


def _pack(checkpoint: HeadCheckpoint) -> Iterator[bytes]:
    about = {
        "version": checkpoint.version,
        "next_uid": checkpoint.next_uid,
        "position": checkpoint.position,
        "again": [asdict(issue) for issue in checkpoint.again],
        "results": checkpoint.results,
        "max_lag": checkpoint.max_lag,
        "source": checkpoint.source,
        "first": checkpoint.first,
        "open": [_about(prompt) for prompt in checkpoint.open],
    }
    yield json.dumps(about).encode() + b"\n"
    for prompt in checkpoint.open:
        for scored in prompt.scored:
            frames = codec.encode(scored, job=JOB)
            yield LENGTH.pack(len(frames))
            for frame in frames:
                yield LENGTH.pack(len(frame))
                yield frame


def _about(prompt: OpenPrompt) -> dict[str, Any]:
    return {
        "uid": prompt.uid,
        "born": prompt.born,
        "n_samples": prompt.n_samples,
        "attempt": prompt.attempt,
        "n_deaths": prompt.n_deaths,
        "issue": asdict(prompt.issue),
        "n_scored": len(prompt.scored),
        **({} if prompt.group is None else {"group": prompt.group}),
    }


def _unpack(body: bytes) -> HeadCheckpoint:
    end = body.index(b"\n") + 1
    about = json.loads(body[:end])
    scored = _scored(memoryview(body)[end:])
    prompts = []
    for found in about["open"]:
        n_scored, issue = found.pop("n_scored"), _issue(found.pop("issue"))
        group = found.pop("group", None)
        verdicts = tuple(next(scored) for _ in range(n_scored))
        prompts.append(OpenPrompt(**found, issue=issue, scored=verdicts, group=group and tuple(group)))
    again = tuple(_issue(issue) for issue in about["again"])
    version, next_uid, position = about["version"], about["next_uid"], about["position"]
    further = about["results"], about.get("max_lag"), about.get("source") or "", about.get("first", {})  # or of older
    return HeadCheckpoint(version, next_uid, position, again, tuple(prompts), *further)


def _issue(found: dict[str, Any]) -> IssuedRow:
    return IssuedRow(Row(**found["drawn"]), found["n_before"])


def _scored(data: memoryview) -> Iterator[Scored]:
    position = 0

    def number() -> int:
        nonlocal position
        (value,) = LENGTH.unpack_from(data, position)
        position += LENGTH.size
        return int(value)

    while position < len(data):
        frames = []
        for _ in range(number()):
            n = number()
            frames.append(bytes(data[position : position + n]))
            position += n
        message = codec.decode(frames, job=JOB)
        if not isinstance(message, Scored):
            raise ValueError(f"it must contain scored trajectories; got a {type(message).__name__}")
        yield message
