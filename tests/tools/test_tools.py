import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from areal_bus.storage.journal import Journal
from benchmarks.jobs import demo
from tools import run, surviving_history, terminal

ROOT = Path(__file__).parents[2]
Out = pytest.CaptureFixture[str]


def forge(folder: Path) -> Path:
    """A run of one head, one generator and one learner."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"rollout": {"max_head_offpolicyness": 2}, "journal": {"dir": ""}}))
    for role in ("head", "generator", "learner"):
        book = Journal(folder / "journal", role=role, index=0, incarnation=0)
        if role == "head":
            book.write(Event.EVALUATION, name="before", version=0, n=8, accuracy=0.25, reward=0.3)
            for step, (spans, n_masked) in enumerate([([0, 5], 0), ([0, 4, 1, 6], 0), ([0, 1, 1, 3, 3, 2], 1)]):
                book.write(Event.BATCH, step=step, clock=step, n_groups=1, n_trajectories=1, short=False)
                fields = {"step": step, "clock": step, "uid": step, "sample": 0, "attempt": 0, "finish": "stop"}
                counts = {"n_tokens": sum(spans[1::2]), "n_masked": n_masked, "versions": spans}
                book.write(Event.TRAJECTORY, reward=step / 2, **fields, **counts)
                book.write(Event.PUBLISH, version=step + 1, v=step + 1, members=1)
            book.write(Event.EVALUATION, name="after", version=3, n=8, accuracy=0.875, reward=0.9)
        book.mark("wait")
        book.close()
    return folder


# finding and reading a run


def test_a_run_is_found_by_folder_by_name_and_as_the_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    forge(tmp_path / "runs" / "one")
    (tmp_path / "runs" / "latest").symlink_to("one")
    assert run.find(None).name == run.find("one").name == run.find(str(tmp_path / "runs" / "one")).name == "one"


def test_a_folder_without_a_journal_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing journal: .* has no ROLE-RANK.INC.jsonl"):
        run.find(str(tmp_path))
    with pytest.raises(ConfigError, match="nowhere does not exist"):
        run.find(str(tmp_path / "nowhere"))


def test_a_tool_without_a_run_ends_with_an_error_line_and_code_2(tmp_path: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-m", "tools.samples"], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert told.returncode == 2
    assert told.stdout == ""
    assert told.stderr == ("error: missing run folder: runs/latest does not exist; name a run's folder\n")


def test_the_journal_is_found_in_the_folder_that_the_config_names(tmp_path: Path) -> None:
    folder = forge(tmp_path / "one")
    (folder / "journal").rename(tmp_path / "local")
    (folder / "config.json").write_text(json.dumps({"journal": {"dir": str(tmp_path / "local")}}))
    assert [path.name for path in run.find(str(folder)).journals()] == [
        "generator-0.0.jsonl",
        "head-0.0.jsonl",
        "learner-0.0.jsonl",
    ]


def test_incarnations_are_ordered_as_numbers(tmp_path: Path) -> None:
    for index, incarnation in [(10, 0), (2, 10), (2, 9)]:
        Journal(tmp_path / "journal", role="generator", index=index, incarnation=incarnation).close()
    names = [path.name for path in run.find(str(tmp_path)).journals()]
    assert names == ["generator-2.9.jsonl", "generator-2.10.jsonl", "generator-10.0.jsonl"]


def test_a_torn_last_line_is_skipped_without_a_warning(tmp_path: Path, capsys: Out) -> None:
    book = Journal(tmp_path, role="head", index=0, incarnation=0)
    for uid in range(3):
        book.write(Event.READY, uid=uid)
    os.truncate(book.path, book.path.stat().st_size - 5)
    assert [line["uid"] for line in run.lines(book.path, "ready")] == [0, 1]
    assert [line["event"] for line in run.lines(book.path)] == ["start", "ready", "ready"]
    assert capsys.readouterr().err == ""


def test_a_broken_line_in_the_middle_is_reported_and_the_rest_is_read(tmp_path: Path, capsys: Out) -> None:
    path = tmp_path / "head-0.0.jsonl"
    deep = '{"event":"ready","uid":' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text('{"event":"ready","uid":0}\n{"event":"rea\n[1]\n' + deep + '\n{"event":"ready","uid":1}\n')
    assert [line["uid"] for line in run.lines(path, "ready")] == [0, 1]
    assert capsys.readouterr().err.splitlines() == [f"{path}: skipped line {n}, which is broken" for n in (2, 3, 4)]


def test_an_event_name_within_a_text_is_not_that_event(tmp_path: Path) -> None:
    book = Journal(tmp_path, role="head", index=0, incarnation=0)
    book.write(Event.NOTE, text='"event":"ready"')
    assert list(run.lines(book.path, "ready")) == []


def test_lines_of_several_processes_come_in_order_of_wall_time(tmp_path: Path) -> None:
    books = [Journal(tmp_path / "journal", role="generator", index=i, incarnation=0) for i in range(3)]
    for i in range(30):
        books[i * 7 % 3].write(Event.NOTE, text=str(i))
    where = run.find(str(tmp_path))
    assert [line["text"] for line in where.events("note")] == [str(i) for i in range(30)]
    assert list(where.events("note", role="learner")) == []


# ages


def test_masked_tokens_are_the_oldest_and_have_no_trained_lag() -> None:
    spans = surviving_history.span_pairs([3, 12, 4, 7, 6, 1])
    assert surviving_history.max_trained_lag(spans, clock=6, n_masked=0) == 3
    assert surviving_history.max_trained_lag(spans, clock=6, n_masked=11) == 3
    assert surviving_history.max_trained_lag(spans, clock=6, n_masked=12) == 2
    assert surviving_history.trained_spans(spans, 14) == [(4, 5), (6, 1)]
    assert surviving_history.max_trained_lag(spans, clock=6, n_masked=20) is None


# benches


def test_the_demo_bench_reads_its_figures_from_the_journal(tmp_path: Path) -> None:
    figures = demo.figures(run.find(str(forge(tmp_path / "one"))), seconds=12.34)
    assert figures["accuracy_before"] == 0.25
    assert figures["accuracy_after"] == 0.875
    assert figures["versions"] == 3
    assert figures["eta"] == 2
    assert figures["seconds"] == 12.3
    assert figures["max_trained_token_lag"] == 1  # step 2 masked the token of version 0
    assert figures["masked_share"] == pytest.approx(1 / 21, abs=1e-4)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            PermissionError(13, "Permission denied", "a/b"),
            "the files must be readable by this user: a/b: Permission denied",
        ),
        (OSError(28, "No space left on device", "a/b"), "a/b: No space left on device"),
        (OSError(28, "No space left on device"), "[Errno 28] No space left on device"),
    ],
)
def test_a_file_or_disk_that_refuses_is_one_sentence(
    capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as ended:
        terminal.end(main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: {said}\n"
