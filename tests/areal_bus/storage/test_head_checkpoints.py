"""Frontiers on disk: what comes back is what was written, or nothing does."""

import errno
import hashlib
import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loguru import logger

from actors.head.checkpoint_writer import HeadCheckpointWriter
from areal_bus.core.effects import Discard, Save
from areal_bus.core.parts.head_checkpoint import START, HeadCheckpoint, HeadSavepoint, OpenPrompt
from areal_bus.core.rows import IssuedRow, Row
from areal_bus.errors import CheckpointError
from areal_bus.messages import Scored
from areal_bus.storage.head_checkpoints import load, mark, path_of, save, usable, waypoints
from tests.areal_bus.wire.test_codec import SCORED, of

COUNT = st.integers(0, 2**40)
TEXT = st.text(st.characters(codec="utf-8"), max_size=20)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
ISSUES = st.builds(IssuedRow, st.builds(Row, COUNT, COUNT, TEXT, TEXT), st.integers(0, 3))
FIGURES = st.dictionaries(TEXT, st.none() | COUNT | FINITE | TEXT, max_size=3)


VERDICTS = st.lists(of(Scored).map(lambda one: replace(one, lease="")), max_size=2).map(tuple)
PROMPTS = st.builds(OpenPrompt, COUNT, COUNT, COUNT, COUNT, COUNT, ISSUES, VERDICTS)
FRONTIERS = st.builds(
    HeadCheckpoint,
    COUNT,
    COUNT,
    COUNT,
    st.lists(ISSUES, max_size=3).map(tuple),
    st.lists(PROMPTS, max_size=3).map(tuple),
    st.dictionaries(TEXT, FIGURES, max_size=2),
    source=TEXT,
)


def frontier(version: int = 3, next_uid: int = 9) -> HeadCheckpoint:
    issue = IssuedRow(Row(7, 0, '{"question": "2 + 2"}'), 1)
    prompt = OpenPrompt(7, 2, 2, 1, 0, issue, (replace(SCORED, uid=7, attempt=1),))
    return HeadCheckpoint(version, next_uid, 12, (issue,), (prompt,), {"before": {"name": "before", "accuracy": None}})


@settings(max_examples=50, deadline=None)
@given(written=FRONTIERS, root=TEXT)
def test_a_head_checkpoint_and_a_savepoint_load_equal_to_the_saved_ones(
    written: HeadCheckpoint, root: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = path_of(tmp_path_factory.getbasetemp(), 1)
    save(path, written)
    assert load(path) == written
    folder = tmp_path_factory.mktemp("waypoints")
    mark(folder, HeadSavepoint(root, written))
    assert waypoints(folder) == [HeadSavepoint(root, written)]


@pytest.mark.slow
def test_a_file_cut_anywhere_or_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    path = path_of(tmp_path, 3)
    save(path, frontier())
    whole = path.read_bytes()
    n_about = whole.index(b"\n") + 1
    for i in range(len(whole)):
        path.write_bytes(whole[:i])
        with pytest.raises(CheckpointError, match="unreadable head checkpoint"):
            load(path)
        for bit in range(8) if i < n_about else [i % 8]:  # the first line has no checksum of its own
            path.write_bytes(whole[:i] + bytes([whole[i] ^ 1 << bit]) + whole[i + 1 :])
            with pytest.raises(CheckpointError):
                load(path)
    path.write_bytes(whole + b"x")
    with pytest.raises(CheckpointError):
        load(path)


def test_a_head_checkpoint_of_an_older_version_is_read_and_one_of_another_schema_refused(tmp_path: Path) -> None:
    path = path_of(tmp_path, 3)
    save(path, frontier())
    first, body, rest = path.read_bytes().split(b"\n", 2)
    older = json.dumps(json.loads(body) | {"eta": 2, "slots": 8}).encode() + b"\n" + rest
    about = json.loads(first) | {"bytes": len(older), "sha256": hashlib.sha256(older).hexdigest()}
    path.write_bytes(json.dumps(about).encode() + b"\n" + older)
    assert load(path) == frontier()
    path.write_bytes(json.dumps(about | {"schema": 2}).encode() + b"\n" + older)
    with pytest.raises(CheckpointError, match="schema"):
        load(path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failed_write_keeps_the_old_checkpoint_and_leaves_no_temporary_file(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = path_of(tmp_path, 3)
    save(path, frontier())

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), full)
        with pytest.raises(OSError, match="no space"):
            save(path, frontier(next_uid=10))
    assert load(path) == frontier()
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


def test_those_that_can_be_used_are_listed_newest_first(tmp_path: Path) -> None:
    for version in (2, 10, 1_000_003, 4):
        save(path_of(tmp_path, version), frontier(version))
    path_of(tmp_path, 4).write_bytes(b"torn")
    (tmp_path / ".frontier-000011.77.tmp").write_bytes(b"half")
    assert usable(tmp_path) == [1_000_003, 10, 2]


# waypoints


def test_the_two_newest_savepoints_are_kept_and_none_is_read_as_a_head_checkpoint(tmp_path: Path) -> None:
    older: HeadSavepoint | None = None
    for version in (2, 3, 4, 3, 4, 5):  # back at 3 the batch of before is lost
        newest = HeadSavepoint(f"learner-0.{version // 4}", frontier(version))
        mark(tmp_path, newest)
        expected = [newest] if older is None else [newest, older] if version % 2 == 0 else [older, newest]
        assert waypoints(tmp_path) == expected
        older = newest
    assert usable(tmp_path) == []
    assert HeadCheckpointWriter(tmp_path).load() == START


def test_a_damaged_savepoint_is_skipped_and_the_other_one_is_read(tmp_path: Path) -> None:
    kept, damaged = HeadSavepoint("learner-0.0", frontier(6)), HeadSavepoint("learner-0.0", frontier(7))
    for one in (kept, damaged):
        mark(tmp_path, one)
    file = tmp_path / "waypoint-1"
    whole, at = file.read_bytes(), file.stat().st_size // 2
    for spoiled in (
        b"",
        whole[:at],
        whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :],
        whole + b"\n",
        whole.replace(b'"root"', b'"toor"', 1),
        os.urandom(300),
    ):
        file.write_bytes(spoiled)
        assert waypoints(tmp_path) == [kept], spoiled
    mark(tmp_path, damaged)
    assert waypoints(tmp_path) == [kept, damaged]


def test_a_full_disk_is_warned_of_and_leaves_no_savepoint_of_that_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the same learner and version would be of a batch that was lost with its head, and count it as trained."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    frontiers = HeadCheckpointWriter(tmp_path)
    for version in (6, 7):
        frontiers.mark(HeadSavepoint("learner-0.0", frontier(version)))
    said: list[str] = []
    hearing = logger.add(said.append, format="{level}: {message}")
    try:
        with monkeypatch.context() as disk:
            disk.setattr(Path, "replace", full)
            frontiers.mark(HeadSavepoint("learner-0.0", frontier(7, next_uid=10)))
    finally:
        logger.remove(hearing)
    assert [one.checkpoint.version for one in frontiers.waypoints()] == [6]
    assert [path.name for path in tmp_path.iterdir()] == ["waypoint-0"]
    (warning,) = said
    assert warning.startswith("WARNING: no savepoint of version 7: if the head dies, this version is lost: ")


# the head's thread that writes them


def test_head_checkpoints_are_written_in_order_and_reported_as_saved(tmp_path: Path) -> None:
    frontiers = HeadCheckpointWriter(tmp_path)
    assert frontiers.load() == START
    written = [frontier(version) for version in (1, 2, 3)]
    for one in written:
        frontiers.do(Save(one))
    frontiers.do(Discard((1, 2, 99)))
    frontiers.settle(20.0, version=1_000_000)
    assert list(frontiers.saved()) == written
    frontiers.close(20.0)
    assert HeadCheckpointWriter(tmp_path).load() == {**START, 3: written[2]}


def test_one_that_the_disk_does_not_take_is_not_saved_and_the_next_one_is(tmp_path: Path) -> None:
    frontiers = HeadCheckpointWriter(tmp_path)
    path_of(tmp_path, 1).mkdir()  # nothing can be renamed to it
    frontiers.do(Save(frontier(1)))
    frontiers.do(Save(frontier(2)))
    frontiers.settle(20.0, version=1_000_000)
    assert [one.version for one in frontiers.saved()] == [2]


def test_a_term_does_not_begin_while_checkpoints_of_a_lost_term_exist(tmp_path: Path) -> None:
    """It would be taken for half of the next checkpoint of its version."""
    frontiers = HeadCheckpointWriter(tmp_path)
    path_of(tmp_path, 4).mkdir()  # cannot be unlinked
    frontiers.do(Discard((4,)))
    with pytest.raises(CheckpointError, match="frontier-000004"):
        frontiers.settle(20.0, version=1_000_000)
    path_of(tmp_path, 4).rmdir()
    frontiers.do(Discard((4,)))
    frontiers.settle(20.0, version=1_000_000)


def test_settle_waits_for_writes_ordered_before_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    frontiers = HeadCheckpointWriter(tmp_path)
    fsync, is_released = os.fsync, threading.Event()

    def blocked(fd: int) -> None:
        assert is_released.wait(20.0)
        fsync(fd)

    monkeypatch.setattr(os, "fsync", blocked)
    for version in range(5):
        frontiers.do(Save(frontier(version)))
    with pytest.raises(CheckpointError, match="cannot delete head checkpoints"):
        frontiers.settle(0.01, version=1_000_000)
    is_released.set()
    frontiers.settle(20.0, version=1_000_000)
    assert len(list(tmp_path.iterdir())) == 5
