"""Journals of several files. Readers get each line once and in order, also while the writer is killed or compresses."""

import errno
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.core.events import Event
from areal_bus.storage import journal_segments
from areal_bus.storage.journal import Journal
from areal_bus.storage.journal_segments import FileSizes, SegmentedFile, newest, raw_lines, segment, tail
from launch.run.runs import largest_incarnation
from tools.follow import JournalFollower
from tools.run import Run
from tools.run_status import Process, process_of

ROOT = Path(__file__).parents[3]
WRITER = """
import sys
from pathlib import Path
from areal_bus.core.events import Event
from areal_bus.storage.journal import Journal
from areal_bus.storage.journal_segments import FileSizes
book = Journal(Path(sys.argv[1]), role="head", index=0, incarnation=0, sizes=FileSizes(2000, 4000))
n = int(sys.argv[2])
while True:
    for _ in range(n % 5):
        book.keep(Event.NOTE, k=n)
        n += 1
    book.write(Event.NOTE, k=n)
    print(n, flush=True)
    n += 1
"""


@settings(max_examples=30, deadline=None)
@given(
    appends=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), max_size=30),
    segment_bytes=st.integers(1, 1500),
    detail_bytes=st.integers(0, 3000),
    n_bytes=st.integers(1, 4000),
)
def test_lines_are_the_same_in_one_file_and_in_many(
    appends: list[list[int]], segment_bytes: int, detail_bytes: int, n_bytes: int
) -> None:
    """Except for the times of spans, which files beyond `detail_bytes` leave out."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head-0.0.jsonl"
        whole: list[bytes] = []
        file = SegmentedFile(path, FileSizes(segment_bytes, detail_bytes))
        for sizes in appends:
            lines = [
                b'{"k":%d,"text":"%s","at_x":[1,2],"z":0}' % (len(whole) + i, b"x" * n) for i, n in enumerate(sizes)
            ]
            file.append(*lines)
            whole += lines
        file.close()
        found = [raw.rstrip(b"\n") for raw in raw_lines(path)]
        without = [line.replace(b',"at_x":[1,2]', b"") for line in whole]
        assert [one in pair for one, *pair in zip(found, whole, without, strict=True)] == [True] * len(whole)
        n_files = newest(path) + 1
        is_plain = [segment(path, number).exists() for number in range(n_files)]
        assert is_plain == [False] * (n_files - 1) + [True]
        assert tail(path, n_bytes) == b"".join(line + b"\n" for line in found)[-n_bytes:]


def test_of_a_writer_killed_while_files_end_every_reported_line_is_there(tmp_path: Path) -> None:
    """Five lives; a reader that follows sees each line once, in order, and the readers of whole journals, too."""
    path = tmp_path / "journal" / "head-0.0.jsonl"
    follower, followed, n_reported = JournalFollower(Run(tmp_path), {"note"}), [], -1
    for life in range(5):
        command = [sys.executable, "-c", WRITER, str(path.parent), str(n_reported + 1000)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            reported = [int(writer.stdout.readline()) for _ in range(40 + 17 * life)]
            assert process_of(path, writer.pid, "") is Process.RUNS
            followed += [line["k"] for line in follower.read()]
            writer.send_signal(signal.SIGKILL)
            reported += [int(line) for line in writer.stdout]
        followed += [line["k"] for line in follower.read()]
        written = [line["k"] for line in Run(tmp_path).events("note") if line["k"] >= reported[0] - 5]
        assert written[: len(written) - 5] == list(range(written[0], written[0] + len(written) - 5))
        assert set(range(reported[0], reported[-1] + 1)) <= set(written)
        n_reported = written[-1]
    assert newest(path) > 5
    assert followed == [line["k"] for line in Run(tmp_path).events("note")]
    assert len(followed) == len(set(followed))
    assert largest_incarnation([path.parent]) == 0


@pytest.mark.parametrize("step", ["write", "fsync", "replace", "unlink"])
def test_a_compression_that_stops_at_any_step_loses_nothing_and_is_made_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    target = {"write": gzip.GzipFile, "fsync": os, "replace": Path, "unlink": Path}[step]
    plain = tmp_path / "reward-0.0.jsonl"
    plain.write_bytes(lines := b'{"seq":0}\n{"seq":1}\n')
    with monkeypatch.context() as broken:
        broken.setattr(target, step, die)
        with pytest.raises(Killed):
            journal_segments.pack(plain, keeps_times=True)
    assert b"".join(raw_lines(plain)) == lines
    file = SegmentedFile(plain, FileSizes(1, 0))
    file.append(b'{"seq":2}')
    file.close()
    assert b"".join(raw_lines(plain)) == lines + b'{"seq":2}\n'
    assert sorted(path.name for path in tmp_path.iterdir() if not path.name.startswith(".")) == [
        "reward-0.0.1.jsonl",
        "reward-0.0.jsonl.gz",
    ]


def test_a_failed_compression_removes_its_partial_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    file = SegmentedFile(tmp_path / "head-0.0.jsonl", FileSizes(1, 0))
    file.append(b'{"seq":0}')
    file.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["head-0.0.1.jsonl", "head-0.0.jsonl"]


def test_without_a_new_file_the_old_one_grows_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "head-0.0.jsonl"
    file = SegmentedFile(path, FileSizes(10, 0))
    (tmp_path / "head-0.0.1.jsonl").mkdir()  # cannot be opened for writing
    file.append(b'{"seq":0}')
    file.append(b'{"seq":1}')
    assert path.read_bytes() == b'{"seq":0}\n{"seq":1}\n'
    file.close()


def test_a_journal_names_its_process_when_its_first_file_is_compressed(tmp_path: Path) -> None:
    book = Journal(tmp_path / "journal", role="generator", index=3, incarnation=2, sizes=FileSizes(300))
    for k in range(20):
        book.write(Event.NOTE, k=k)
    book.close()
    assert not book.path.exists()
    (found,) = Run(tmp_path).journals()
    assert found == book.path
    assert [line["seq"] for line in Run(tmp_path).events()] == list(range(23))
    assert largest_incarnation([tmp_path / "journal"]) == 2
    assert json.loads(tail(book.path, 1 << 16).splitlines()[-1])["event"] == "end"
