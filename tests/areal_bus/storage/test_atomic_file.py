"""Small files that are replaced as a whole."""

import os
from pathlib import Path

import pytest

from areal_bus.core.parts.split import RankPool, Split
from areal_bus.storage import run_files
from areal_bus.storage.atomic_file import write_atomic
from launch.run import elastic
from launch.run.runs import PidFile
from tests.launch.test_supervise import context


def test_a_temporary_file_that_a_dead_writer_left_is_replaced(tmp_path: Path) -> None:
    left = tmp_path / ".file.tmp"
    left.write_text("half")
    left.chmod(0o644)
    write_atomic(tmp_path / "file", "whole", mode=0o600)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "whole"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("name", ["best.json", "split.json", "join.json", "pid"])
def test_each_file_of_a_run_is_on_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    {
        "best.json": lambda: run_files.write_best(tmp_path, "reward", [(1, 0.5)]),
        "split.json": lambda: run_files.write_split(tmp_path, RankPool(1, 2, 1, 1), Split(1, 2)),
        "join.json": lambda: elastic.write_invitation(context(run=tmp_path)),
        "pid": lambda: PidFile(tmp_path),
    }[name]()
    assert synced == [f".{name}.tmp", tmp_path.name]
