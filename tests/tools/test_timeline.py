"""tools.timeline over real runs, whose journals are changed as each test needs."""

import gzip
import json
import re
import shutil
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from areal_bus.errors import ConfigError
from tools.breakdown.incarnations import read_all
from tools.breakdown.steps import read_steps, summary
from tools.run import Run
from tools.timeline import __main__ as command
from tools.timeline.clocks import read_clocks

Trace = list[dict[str, Any]]
Line = dict[str, Any]
Out = pytest.CaptureFixture[str]


def changed(folder: Path, change: Callable[[str, Line], Line]) -> None:
    """Rewrites each line of each actor (generator-0) in place."""
    for path in Run(folder).journals():
        lines = [change(path.name.partition(".")[0], json.loads(line)) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


@pytest.fixture
def run(journals: Path, tmp_path: Path) -> Path:
    """A copy of the run bound by pushes: ten versions of two groups of two samples."""
    return Path(shutil.copytree(journals / "push-bound", tmp_path / "run"))


def trace_of(folder: Path, *arguments: str) -> Trace:
    assert command.main([str(folder), *arguments]) == 0
    with gzip.open(folder / "trace.json.gz", "rt") as file:
        events: Trace = json.load(file)["traceEvents"]
    return events


def track_names(trace: Trace, kind: str) -> dict[Any, str]:
    return {
        (one["pid"], one.get("tid")) if kind == "thread_name" else one["pid"]: one["args"]["name"]
        for one in trace
        if one["name"] == kind
    }


def label_sums(trace: Trace) -> dict[str, dict[str, float]]:
    """Seconds by process and label, a cause counted as its label."""
    names, sums = track_names(trace, "process_name"), defaultdict[str, dict[str, float]](lambda: defaultdict(float))
    for one in trace:
        if one.get("cat") == "label":
            sums[names[one["pid"]]][one["name"].partition(":")[0]] += one["dur"] / 1e6
    return sums


def check_nesting(trace: Trace) -> None:
    """On every track each slice lies within or beside each other one."""
    tracks = defaultdict[tuple[int, int], list[tuple[float, float]]](list)
    for one in trace:
        if one["ph"] == "X":
            assert one["dur"] >= 0
            tracks[one["pid"], one["tid"]].append((one["ts"], -one["dur"]))
    for track in tracks.values():
        ends: list[float] = []
        for begin, minus in sorted(track):
            while ends and ends[-1] <= begin + 0.002:  # times are rounded to a nanosecond
                ends.pop()
            assert not ends or begin - minus <= ends[-1] + 0.002
            ends.append(begin - minus)


def check_flows(trace: Trace) -> dict[int, list[str]]:
    """Every flow begins, ends, moves forward and binds to slices; returns the names of the slices of each flow."""
    slices = defaultdict[tuple[int, int], list[dict[str, Any]]](list)
    flows = defaultdict[int, list[dict[str, Any]]](list)
    for one in trace:
        if one["ph"] == "X":
            slices[one["pid"], one["tid"]].append(one)
        elif one["ph"] in "stf":
            flows[one["id"]].append(one)
    found = {}
    for number, flow in flows.items():
        assert [one["ph"] for one in flow] == ["s", *["t"] * (len(flow) - 2), "f"]
        assert [one["ts"] for one in flow] == sorted(one["ts"] for one in flow)
        found[number] = []
        for one in flow:
            track = slices[one["pid"], one["tid"]]
            (bound,) = [s for s in track if s["ts"] - 1e-3 <= one["ts"] <= s["ts"] + s["dur"] + 1e-3][-1:]
            found[number].append(bound["name"])
    return found


def test_a_trajectory_flows_from_its_admission_to_the_next_sample(run: Path, capsys: Out) -> None:
    changed(
        run, lambda name, line: line | {"state": "dead"} if line["event"] == "member" and line["t"] > 59020 else line
    )
    trace = trace_of(run)
    flows = list(check_flows(trace).values())
    assert len(flows) == 40
    for flow in flows:
        uid, sample = flow[1].removeprefix("sample ").split(".")
        version = flow[4].removeprefix("update ")
        assert flow[:5] == [f"admit {uid}", f"sample {uid}.{sample}", f"score {uid}.{sample}",
                            f"batch of version {version}", f"update {version}"]  # fmt: skip
        assert re.fullmatch(rf"push \d+: version {version}", flow[5])
        assert [name.partition(" ")[0] for name in flow[6:]] == ([] if version == "10" else ["sample"])
    instants = {one["name"] for one in trace if one["ph"] == "i"}
    assert instants >= {"term 0: version 0", "joined: learner-0.0"}
    assert any(name.startswith("dead: generator-") for name in instants)
    counters = {one["name"] for one in trace if one["ph"] == "C"}
    assert counters >= {"live prompts", "ready groups", "lag (mean)", "lag (max)", "tokens/s", "memory (MiB)"}
    ready = [one["args"]["value"] for one in trace if one["name"] == "ready groups"]
    assert ready[1:] == [1, 2, 0] * 10
    tracks = set(track_names(trace, "thread_name").values())
    assert tracks >= {"time", "admissions", "batches", "pushes", "updates", "slot 0", "slot 1", "score 0", "push"}
    assert "host-a: the clock of the head" in capsys.readouterr().out


def test_parts_and_spans_without_times_have_the_seconds_of_their_labels(run: Path) -> None:
    """Of a journal whose spans are all short, and of one of an older version: neither has the times of spans."""

    def without_times(name: str, line: Line) -> Line:
        gone = ("at_", "w_", "rss_", *(["host"] if line["event"] == "start" else []))
        kept = {key: value for key, value in line.items() if not key.startswith(gone)}
        return kept | ({"p_generate:prefill": line["s_generate"] / 2} if "s_generate" in line else {})

    changed(run, without_times)
    trace = trace_of(run)
    check_nesting(trace)
    sums = label_sums(trace)
    for actor in read_all(Run(run)):
        assert sums[actor.name.partition(".")[0]] == pytest.approx(actor.spans, abs=2e-5)
    prefill_us = sum(one["dur"] for one in trace if one["name"] == "prefill")
    assert prefill_us == pytest.approx(5e5 * sum(sums[f"generator-{i}"]["generate"] for i in (0, 1)), rel=0.01)


@pytest.mark.parametrize("shift", [-5000.0, 0.25, 7e6])
def test_clocks_of_hosts_are_aligned_within_the_stated_error(shift: float, run: Path) -> None:
    def moved(name: str, line: Line) -> Line:
        """Generator 1 and the reward are on another host, whose clock is ahead."""
        if name not in ("generator-1", "reward-0"):
            return line
        return line | {"t": line["t"] + shift} | ({"host": "two"} if line["event"] == "start" else {})

    changed(run, moved)
    first, second = read_clocks(Run(run)).all
    assert (first.host, first.offset_s, first.error_s) == ("host-a", 0.0, 0.0)
    assert second.error_s is not None
    assert 0 < second.error_s < 0.01
    assert abs(second.offset_s + shift) <= second.error_s + 1e-6
    trace = trace_of(run)
    check_nesting(trace)
    assert all(flow[0].startswith("admit") and "score" in flow[2] for flow in check_flows(trace).values())


def test_a_window_and_a_step_leave_out_the_rest(run: Path) -> None:
    whole = trace_of(run)
    part = trace_of(run, "--from", "20", "--to", "30.5")
    times = [one["ts"] for one in part if "ts" in one]
    assert 20e6 <= min(times) <= max(times) <= 30.5e6
    assert len(part) < len(whole)
    check_nesting(part)
    check_flows(part)
    step = trace_of(run, "--step", "2")
    assert sum("batch of version 2" in flow for flow in check_flows(step).values()) == 4
    assert {one["name"] for one in step if one.get("cat") == "update"} == {"update 2"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--step", "11"],
            "unknown version --step 11: it names the version that an update made; the run has versions 1 to 10",
        ),
        (["--step", "1", "--from", "2"], "--step chooses the time itself: give it without --from and --to"),
        (["--from", "3", "--to", "2"], "--from must lie before --to and within the run of"),
        (["--output", "/nowhere/trace.json.gz"], "the trace must be writable: /nowhere/trace.json.gz: No such file"),
    ],
)
def test_a_bad_argument_ends_with_one_sentence(arguments: list[str], sentence: str, run: Path) -> None:
    with pytest.raises(ConfigError, match=sentence):
        command.main([str(run), *arguments])
    assert not list(run.glob("*.part"))


def test_a_run_without_a_head_or_of_another_schema_is_refused(run: Path) -> None:
    head = run / "journal" / "head-0.0.jsonl"
    head.write_text(head.read_text().replace('"schema":1', '"schema":0'))
    with pytest.raises(ConfigError, match=r"this version reads journals of schema 1: .* has schema 0"):
        command.main([str(run)])
    head.unlink()
    with pytest.raises(ConfigError, match="missing journal of the head"):
        command.main([str(run)])


@pytest.mark.parametrize(
    ("name", "figure", "least"),
    [
        ("generation-bound", "wait_sampling_s", 0.9),
        ("learner-bound", "update_s", 0.9),
        ("push-bound", "wait_push_s", 0.4),
    ],
)
def test_a_kept_journal_shows_the_stage_that_docs_profiling_names(
    name: str, figure: str, least: float, journals: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(journals / name, tmp_path / name))
    medians = {key: numbers["median"] for key, numbers in summary(read_steps(Run(folder))).items()}
    assert medians[figure] > least * medians["step_s"]
    trace = trace_of(folder)
    check_nesting(trace)
    assert all(names[0].startswith("admit") for names in check_flows(trace).values())
    for actor in read_all(Run(folder)):
        assert label_sums(trace)[actor.name.partition(".")[0]] == pytest.approx(actor.spans, abs=2e-5)
