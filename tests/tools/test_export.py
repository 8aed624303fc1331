"""Trackers: series from journal lines, the follower of a growing journal, and each tracker's files read back.

The tests of TensorBoard, W&B, Trackio, MLflow and SwanLab are skipped where their packages are missing;
`make setup` installs them.
"""

import csv
import json
import math
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_bus.config.names import trackers
from areal_bus.errors import ConfigError
from launch.run.rank import Followers
from tools import export
from tools.follow import JournalFollower
from tools.run import Run
from tools.trackers import series
from tools.trackers.series import EVENTS, Row, SeriesReader, Undone

ROOT = Path(__file__).parents[2]
Out = pytest.CaptureFixture[str]


def needs(package: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed")


class Ring:
    """Writes the journal of a head, a learner and a generator; every line is 0.1 s after the one before."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.n, self.term, self.trained = folder, 0, 0, 0
        (folder / "journal").mkdir(parents=True)
        (folder / "samples").mkdir()
        (folder / "config.json").write_text(json.dumps({"actor": {"lr": 0.5}}))
        for role in ("head", "learner", "generator"):
            self.line(role, "start", schema=1, pid=1)
        self.line("head", "term", version=0)

    def line(self, role: str, event: str, **fields: Any) -> None:
        self.n += 1
        envelope = {"t": self.n / 10, "wall": 1000 + self.n / 10, "term": self.term, "role": role, "rank": 0, "inc": 0}
        with (self.folder / "journal" / f"{role}-0.0.jsonl").open("a") as file:
            file.write(json.dumps(envelope | {"seq": self.n, "event": event} | fields, separators=(",", ":")) + "\n")

    def update(self, reward: float) -> None:
        """One step with two trajectories of 10 and 30 tokens."""
        step, version = self.trained, self.trained + 1
        self.line("generator", "spans", s_generate=0.75, s_idle=0.25)
        self.line("head", "admit", live=4, in_training=2)
        self.line("head", "batch", step=step, clock=step)
        for sample, n, lag in ((0, 10, 0), (1, 30, 1)):
            ids = {"step": step, "clock": step, "uid": step, "sample": sample, "attempt": 0}
            spans = [max(step - lag, 0), n]
            self.line("head", "trajectory", **ids, reward=reward + n, n_tokens=n, versions=spans)
        figures = {"reward": reward, "n_tokens": 40, "mismatch_kl": 0.01, "grad_norm": math.nan, "new_figure": 7}
        self.line("learner", "step", version=version, digest="0", **figures)
        self.line("head", "update", version=version, u=version, digest="0", **figures)
        self.line("head", "push", version=version, catch_up=False)
        self.line("generator", "pushed", version=version, stall_s=0.5)
        self.line("head", "publish", version=version)
        with (self.folder / "samples" / "samples.jsonl").open("a") as file:
            sample = {
                "version": step,
                "step": step,
                "uid": step,
                "sample": 0,
                "attempt": 0,
                "reward": reward,
                "evaluation": "",
            }
            file.write(json.dumps(sample | {"finish": "stop", "prompt": "2+2?", "completion": "4"}) + "\n")
        self.trained = version

    def go_back(self, version: int) -> None:
        """The learner restarted from a checkpoint."""
        self.term, self.trained = self.term + 1, version
        self.line("head", "term", version=version)

    def evaluate(self, name: str, accuracy: float) -> None:
        self.line("head", "evaluation", name=name, version=self.trained, accuracy=accuracy, reward=None, n=8)


@pytest.fixture
def ring(tmp_path: Path) -> Ring:
    return Ring(tmp_path / "ring")


def rows_of(folder: Path) -> list[Row | Undone]:
    reader = SeriesReader()
    return [row for line in JournalFollower(Run(folder), EVENTS).read() for row in reader.take(line)]


def surviving(folder: Path) -> dict[str, dict[int, float]]:
    """series -> version -> value, without undone rows. NaN is left out."""
    found: dict[str, dict[int, float]] = {}
    for row in rows_of(folder):
        if isinstance(row, Undone):
            found = {name: {v: x for v, x in points.items() if v <= row.version} for name, points in found.items()}
        else:
            for name, value in row.values.items():
                if not math.isnan(value):
                    found.setdefault(name, {})[row.step] = value
    return {name: points for name, points in found.items() if points}


def exported(folder: Path, tracker: str, *options: str, **environ: str) -> str:
    """The output of an export in a process of its own."""
    line = [sys.executable, "-m", "tools.export", str(folder), "--to", tracker, *options]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def exported_twice(ring: Ring, tracker: str, **environ: str) -> None:
    """Two versions and an evaluation, by two starts of the export."""
    ring.update(1.0)
    exported(ring.folder, tracker, **environ)
    ring.update(2.0)
    ring.evaluate("after", 0.5)
    exported(ring.folder, tracker, **environ)


def printed(code: str, *arguments: str, **environ: str) -> Any:
    """The JSON in the last line that a program prints, which has the tracker's own package."""
    line = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(line, env=os.environ | environ, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


# series


def test_every_series_has_the_value_of_its_lines(ring: Ring) -> None:
    ring.evaluate("before", 0.25)
    ring.update(0.5)
    ring.line("head", "refund", uid=1, reason="too_old", n_tokens_dropped=9)
    ring.update(0.75)
    ring.evaluate("step-2:hard", 0.5)
    first, second, third, last = rows_of(ring.folder)
    assert isinstance(third, Row)
    assert (first, last) == (
        Row("evaluation/before", 0, first.wall, {"eval/accuracy": 0.25, "eval/n": 8.0}),  # type: ignore[union-attr]
        Row("evaluation/step-2:hard", 2, last.wall, {"eval/hard/accuracy": 0.5, "eval/hard/n": 8.0}),  # type: ignore[union-attr]
    )
    values = dict(third.values)
    assert math.isnan(values.pop("train/grad_norm"))
    step_s = values.pop("perf/step_s")
    assert step_s == pytest.approx(1.1)  # eleven lines between the two steps
    assert values.pop("perf/tokens_per_s") == pytest.approx(40 / step_s)
    assert values.pop("perf/push_s") == pytest.approx(0.2)
    assert values == {
        "rollout/reward": 0.75, "rollout/reward_std": 10.0, "rollout/reward_min": 10.75, "rollout/reward_max": 30.75,
        "rollout/n_tokens": 40.0, "rollout/length": 20.0,
        "rollout/length_max": 30.0, "staleness/trajectory_lag": 0.5, "staleness/trajectory_lag_max": 1.0,
        "train/kl": 0.01, "train/new_figure": 7.0, "perf/push_stall_s": 0.5, "ring/live_prompts": 4.0,
        "ring/in_training": 2.0, "ring/restarts": 0.0, "ring/refunds": 1.0, "ring/refunds/too_old": 1.0,
        "ring/dropped_tokens": 9.0, "time/generator/generate": 0.75, "time/generator/idle": 0.25,
    }  # fmt: skip
    assert isinstance(second, Row)
    assert second.step == 1


def test_rewards_by_name_are_series_of_a_batch_and_of_an_evaluation(ring: Ring) -> None:
    by_name = {"reward:answer": 0.5, "reward:style/length": -2.0}
    ring.line("head", "batch", step=0, clock=0, **by_name)
    ring.line("learner", "step", version=1, digest="0", reward=0.1)
    ring.line("head", "evaluation", name="step-1:hard", version=1, reward=0.1, **by_name)
    found = surviving(ring.folder)
    assert (found["rollout/reward/answer"], found["rollout/reward/style/length"]) == ({1: 0.5}, {1: -2.0})
    assert found["eval/hard/reward/answer"] == {1: 0.5}


def test_a_later_term_undoes_later_versions_and_they_come_again(ring: Ring) -> None:
    for reward in (1.0, 2.0, 3.0):
        ring.update(reward)
    ring.go_back(1)
    ring.term = 0
    ring.line("learner", "step", version=4, digest="0", reward=9.0)  # late, of the term before
    ring.term = 1
    assert [row.version for row in rows_of(ring.folder) if isinstance(row, Undone)] == [1]
    ring.update(20.0)
    assert surviving(ring.folder)["rollout/reward"] == {1: 1.0, 2: 20.0}


def test_broken_lines_and_those_of_another_schema_are_passed_over(ring: Ring, capsys: Out) -> None:
    with (ring.folder / "journal" / "head-0.0.jsonl").open("a") as file:
        file.write('{"event":"update","torn\n')
    ring.line("head", "update", version="two")
    ring.line("head", "evaluation", accuracy=1.0)
    ring.line("generator", "spans", s_idle="long")
    ring.line("head", "refund", reason="too_old")
    ring.update(1.0)
    assert [row.step for row in rows_of(ring.folder) if isinstance(row, Row)] == [1]
    assert "skipped broken line" in capsys.readouterr().err


def test_the_page_lists_every_series_and_the_journal_every_figure() -> None:
    page = (ROOT / "docs" / "trackers.md").read_text().partition("## Names")[2]
    assert re.findall(r"^- `([a-zA-Z_/]+)`: (.+)$", page, re.MULTILINE) == series.catalogue()
    figures = (ROOT / "docs" / "journal.md").read_text().partition("## Figures of a step")[2].partition("## ")[0]
    assert {key for key in series.FIGURES if f"`{key}`" not in figures} == set()


# the follower


@settings(max_examples=12)
@given(cuts=st.lists(st.integers(1, 6000), max_size=8))
def test_a_journal_read_while_it_grows_gives_the_rows_of_the_whole(cuts: list[int]) -> None:
    with tempfile.TemporaryDirectory() as name:
        whole, grown = Ring(Path(name) / "whole"), Path(name) / "grown"
        for reward in range(3):
            whole.update(reward)
        data = {path.name: path.read_bytes() for path in (whole.folder / "journal").iterdir()}
        (grown / "journal").mkdir(parents=True)
        reader, rows, journal = SeriesReader(), [], JournalFollower(Run(grown), EVENTS)
        # bytes of every file arrive in the order of the lines' walls, cut anywhere
        stamped = sorted((json.loads(x)["wall"], name, x + b"\n") for name, d in data.items() for x in d.splitlines())
        stream = [(name, bytes([byte])) for _, name, line in stamped for byte in line]
        for begin, end in zip([0, *sorted(cuts)], [*sorted(cuts), len(stream)], strict=True):
            for file, byte in stream[begin:end]:
                with (grown / "journal" / file).open("ab") as out:
                    out.write(byte)
            rows += [repr(row) for line in journal.read() for row in reader.take(line)]
        assert rows == [repr(row) for row in rows_of(whole.folder)]


def test_a_line_waits_until_no_other_process_can_write_an_earlier_one(ring: Ring) -> None:
    ring.update(1.0)
    journal = JournalFollower(Run(ring.folder), EVENTS)
    early = list(journal.read(1000.45))
    late = list(journal.read())
    assert [line["wall"] <= 1000.45 for line in early + late] == [True] * len(early) + [False] * len(late)
    assert [line["seq"] for line in early + late] == list(range(1, ring.n + 1))


# trackers


def test_tables_hold_the_surviving_history(ring: Ring, capsys: Out) -> None:
    for reward in (1.0, 2.0, 3.0):
        ring.update(reward)
    ring.go_back(1)
    ring.update(20.0)
    for tracker in ("csv", "parquet"):
        assert export.main([str(ring.folder), "--to", tracker]) == 0
    expected = surviving(ring.folder)
    with (ring.folder / "trackers" / "csv" / "scalars.csv").open() as file:
        records = list(csv.DictReader(file))
    assert [record["version"] for record in records] == ["1", "2"]
    columns = set(records[0]) - {"version", "wall", "train/grad_norm"}
    read = {name: {int(r["version"]): float(r[name]) for r in records if r[name]} for name in columns}
    assert read == expected
    parquet = pytest.importorskip("pyarrow.parquet")
    table = parquet.read_table(ring.folder / "trackers" / "parquet" / "scalars.parquet").to_pydict()
    assert {name: {v: x for v, x in zip(table["version"], table[name], strict=True) if x is not None}
            for name in columns} == expected  # fmt: skip


@needs("tensorboard")
def test_tensorboard_reads_each_step_once_after_a_rollback_and_a_second_start(ring: Ring) -> None:
    for reward in (1.0, 2.0, 3.0):
        ring.update(reward)
    export.main([str(ring.folder), "--to", "tensorboard"])
    ring.go_back(1)
    ring.update(20.0)
    ring.evaluate("after", 0.5)
    export.main([str(ring.folder), "--to", "tensorboard"])
    ring.update(30.0)
    export.main([str(ring.folder), "--to", "tensorboard"])
    code = (
        "import json, sys; from tensorboard.backend.event_processing.event_accumulator import EventAccumulator as E\n"
        "e = E(sys.argv[1], size_guidance={'scalars': 0}); e.Reload()\n"
        "print(json.dumps({t: [(x.step, x.value) for x in e.Scalars(t)] for t in e.Tags()['scalars']}))"
    )
    folder = ring.folder / "trackers" / "tensorboard"
    scalars = printed(code, str(folder))
    read = {name: [(v, x) for v, x in points if not math.isnan(x)] for name, points in scalars.items()}
    expected = surviving(ring.folder)
    assert expected["rollout/reward"] == {1: 1.0, 2: 20.0, 3: 30.0}
    assert {name: points for name, points in read.items() if points} == {
        name: [(v, pytest.approx(x)) for v, x in sorted(points.items())] for name, points in expected.items()
    }


@needs("wandb")
@pytest.mark.slow
def test_wandb_gets_each_step_once_over_two_starts(ring: Ring) -> None:
    offline = {"WANDB_MODE": "offline"}
    ring.update(1.0)
    ring.update(2.0)
    exported(ring.folder, "wandb", **offline)
    ring.go_back(1)
    ring.update(20.0)
    ring.update(30.0)
    ring.evaluate("after", 0.5)
    exported(ring.folder, "wandb", **offline)
    files = sorted((ring.folder / "trackers" / "wandb").rglob("run-*.wandb"))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # the same W&B run
    history = [item for file in files for item in wandb_history(file)]
    rewards = [(item["version"], item["rollout/reward"]) for item in history if "rollout/reward" in item]
    assert rewards == [(1, 1.0), (2, 2.0), (3, 30.0)]  # version 2 keeps its first values, as docs/trackers.md states
    assert [item["version"] for item in history if "eval/accuracy" in item] == [3]
    tables = [item for item in history if "samples" in item or any("samples" in str(key) for key in item)]
    assert len(tables) == 2
    shown = json.loads(max((ring.folder / "trackers" / "wandb").rglob("*.table.json"), key=str).read_text())
    assert "4" in shown["data"][0]


def wandb_history(file: Path) -> Iterator[dict[str, Any]]:
    """The logged items of a .wandb file: records in the log format of LevelDB, after a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, record = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + 7])
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # full, last
            parsed = Record.FromString(record)
            record = b""
            if parsed.WhichOneof("record_type") == "history":
                items = parsed.history.item
                yield {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}


@needs("trackio")
@pytest.mark.slow
def test_trackio_gets_each_step_once_over_two_starts(ring: Ring, tmp_path: Path) -> None:
    home = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    exported_twice(ring, "trackio", **home)
    code = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as S\n"
        "runs = S.get_runs('areal-bus'); print(json.dumps([S.get_logs('areal-bus', run) for run in runs]))"
    )
    (logs,) = printed(code, **home)
    assert [(x["step"], x["rollout/reward"]) for x in logs if "rollout/reward" in x] == [(1, 1.0), (2, 2.0)]
    assert [x["step"] for x in logs if "eval/accuracy" in x] == [2]
    assert sum("samples" in x for x in logs) == 2


@needs("mlflow")
@pytest.mark.slow
def test_mlflow_gets_each_step_once_over_two_starts_without_a_server(ring: Ring) -> None:
    exported_twice(ring, "mlflow")
    code = (
        "import json, sys; from mlflow.tracking import MlflowClient; c = MlflowClient(sys.argv[1])\n"
        "(run,) = c.search_runs([c.get_experiment_by_name('areal-bus').experiment_id])\n"
        "history = {name: [(m.step, m.value) for m in c.get_metric_history(run.info.run_id, name)]\n"
        "           for name in run.data.metrics}\n"
        "files = [f.path for f in c.list_artifacts(run.info.run_id, 'samples')]\n"
        "print(json.dumps([history, run.data.params, run.info.status, files]))"
    )
    place = (ring.folder / "trackers" / "mlflow").resolve().as_uri()
    history, params, status, files = printed(code, place, MLFLOW_ALLOW_FILE_STORE="true")
    assert history["rollout/reward"] == [[1, 1.0], [2, 2.0]]
    assert history["eval/accuracy"] == [[2, 0.5]]
    assert (params, status) == ({"actor.lr": "0.5"}, "FINISHED")
    assert files == ["samples/000000.jsonl", "samples/000001.jsonl"]


@needs("swanlab")
@pytest.mark.slow
def test_swanlab_gets_each_step_once_over_two_starts_offline(ring: Ring, tmp_path: Path) -> None:
    exported_twice(ring, "swanlab", SWANLAB_MODE="offline", HOME=str(tmp_path))
    files = sorted((ring.folder / "trackers" / "swanlab").rglob("run-*.swanlab"), key=lambda file: str(file.parent))
    assert len(files) == 2
    assert len({file.name for file in files}) == 1  # the same run
    assert [file.read_bytes().count(b"rollout/reward_max") > 0 for file in files] == [True, True]
    texts = [
        file.read_text() for file in (ring.folder / "trackers" / "swanlab").rglob("*.txt") if "media" in file.parts
    ]
    assert any('"completion": "4"' in text for text in texts)


def test_a_tracker_of_the_user_writes_beside_a_job_and_afterwards(ring: Ring, tmp_path: Path, capfd: Out) -> None:
    """The class that docs/trackers.md shows, beside the config that the run records; no other test has its module."""
    page = (ROOT / "docs" / "trackers.md").read_text().partition("## A tracker of your own")[2]
    code = page.partition("```python\n")[2].partition("```")[0]
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "own_tracker.py").write_text(code)
    (ring.folder / "origin.json").write_text(json.dumps({"folder": str(tmp_path / "beside")}))
    ring.update(0.5)
    followers = Followers()
    followers.start(ring.folder, ["own_tracker:Lines"])
    followers.end()
    assert "own_tracker" not in capfd.readouterr().err
    assert "1 new rows for own_tracker:Lines" in (ring.folder / "logs" / "tracker-own_tracker-Lines.txt").read_text()
    ring.update(1.0)
    exported(ring.folder, "own_tracker:Lines")
    written = (ring.folder / "trackers" / "own_tracker-Lines" / "lines.jsonl").read_text().splitlines()
    assert [(row["step"], row["rollout/reward"]) for row in map(json.loads, written)] == [(1, 0.5), (2, 1.0)]


class Short:
    takes_undo = True
    is_rewritten = takes_samples = False

    def write(self, rows: Any) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mine:Short", "journal.tracker 'mine:Short' has no undo"),
        ("mine:make", "journal.tracker 'mine:make' has no takes_samples, write, close"),
        ("mine:Missing", "cannot import journal.tracker 'mine:Missing': AttributeError"),
        ("nowhere:Writer", "cannot import journal.tracker 'nowhere:Writer': ModuleNotFoundError"),
        ("mine:number", "must name a class: it is a int"),
        ("tensorbord", "unknown journal.tracker 'tensorbord': it is \"tensorboard\", "),
        ("mine:", "unknown journal.tracker 'mine:'"),
    ],
)
def test_a_tracker_that_is_no_writer_is_refused(
    ring: Ring, monkeypatch: pytest.MonkeyPatch, name: str, said: str
) -> None:
    part = SimpleNamespace(takes_undo=False, is_rewritten=False)
    mine = SimpleNamespace(Short=Short, number=3, make=lambda target: part)
    monkeypatch.setitem(sys.modules, "mine", mine)
    with pytest.raises(ConfigError, match=re.escape(said)):
        export.main([str(ring.folder), "--to", name])


def test_a_missing_package_and_a_second_writer_are_refused(ring: Ring, monkeypatch: pytest.MonkeyPatch) -> None:
    ring.update(1.0)
    with (
        export.open_session(Run(ring.folder), "csv", ring.folder / "trackers", new=False),
        pytest.raises(ConfigError, match="one process at a time writes a tracker run"),
    ):
        export.main([str(ring.folder), "--to", "csv"])
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=r"pip install .*'areal-bus\[wandb\]'"):
        export.main([str(ring.folder), "--to", "wandb"])


# followers of a job


def test_a_follower_writes_the_last_lines_of_a_job_and_its_death_is_reported_once(tmp_path: Path, capfd: Out) -> None:
    (tmp_path / "run").mkdir()
    followers = Followers()
    followers.start(tmp_path / "run", ["csv"])  # as in a job: before the first line of the journal
    ring = Ring(tmp_path / "run" / "ring")
    for name in ("journal", "samples", "config.json"):
        (ring.folder / name).rename(tmp_path / "run" / name)
    ring.folder = tmp_path / "run"
    ring.update(1.0)
    followers.end()
    assert capfd.readouterr().err == ""
    assert (tmp_path / "run" / "trackers" / "csv" / "scalars.csv").read_text().count("\n") == 2
    assert "1 new rows for csv" in followers.log("csv").read_text()

    crashing = Followers(command=(sys.executable, "-c", "raise SystemExit(7)"))
    crashing.start(tmp_path / "run", ["wandb"])
    crashing._processes["wandb"].wait(30)
    crashing.check()
    crashing.check()
    crashing.end()
    said = capfd.readouterr().err
    assert said.count("tracker wandb: ended with exit code 7") == said.count("the job goes on") == 1
