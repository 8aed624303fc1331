"""Temporary folders: those of dead writers go, those of living ones stay."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus.storage.versioned_dirs import delete_unlocked, temporary_folder

WRITER = """
import sys, time
from pathlib import Path
from areal_bus.storage.versioned_dirs import temporary_folder
with temporary_folder(Path(sys.argv[1])) as folder:
    (folder / "weights").write_text("half", encoding="utf-8")
    print(folder, flush=True)
    time.sleep(600)
"""


def test_a_renamed_folder_stays_and_an_unfinished_one_is_deleted(tmp_path: Path) -> None:
    final = tmp_path / "deep" / "base"
    with temporary_folder(final) as folder:
        (folder / "weights").write_text("whole", encoding="utf-8")
        folder.rename(final)
    with pytest.raises(OSError, match="full"), temporary_folder(tmp_path / "deep" / "other"):
        raise OSError("the disk is full")
    assert [path.name for path in final.parent.iterdir()] == ["base"]


def test_the_folder_of_a_killed_writer_is_deleted_by_the_next_and_that_of_a_living_one_stays(tmp_path: Path) -> None:
    final = tmp_path / "base"
    words = [sys.executable, "-c", WRITER, str(final)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdout is not None
        theirs = Path(writer.stdout.readline().strip())
        with temporary_folder(final):
            assert (theirs / "weights").is_file()
        writer.kill()
    assert theirs.is_dir()
    with temporary_folder(final):
        assert not theirs.exists()


def test_a_folder_with_the_pid_of_a_living_process_in_its_name_is_no_living_writers(tmp_path: Path) -> None:
    """As older versions named them: in a container the pid of a dead writer repeats."""
    left, other = tmp_path / f".base.{os.getpid()}.tmp", tmp_path / ".other.1.tmp"
    left.mkdir()
    other.mkdir()
    with temporary_folder(tmp_path / "base"):
        assert not left.exists()
    assert other.is_dir()  # of another place
    delete_unlocked(tmp_path / "absent")
