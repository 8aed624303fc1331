import gzip
import json
import random
import shutil
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.errors import ConfigError
from areal_bus.storage.journal import Journal
from tools.breakdown.incarnations import read_all
from tools.breakdown.steps import read_steps, summary
from tools.run import Run
from tools.timeline import __main__ as command
from tools.timeline.clocks import read_clocks

Trace = list[dict[str, Any]]
Out = pytest.CaptureFixture[str]
N_STEPS, N_GROUPS, N_SAMPLES = 4, 3, 2


class Ring:
    """A forged run on a virtual clock: a head, two generators, a reward, a learner; hosts may have other clocks."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *, shift: float = 0.0, delay: float = 0.0
    ) -> None:
        """`shift`: of the clock of the second host, with generator 1 and the reward. `delay` of every message."""
        self.now, self.shift, self.delay = 100.0, shift, delay
        self.current = 0.0
        monkeypatch.setattr("areal_bus.storage.journal.time", self)
        self.books: dict[str, Journal] = {}
        for name in ("head-0", "generator-0", "generator-1", "reward-0", "learner-0"):
            role, _, index = name.partition("-")
            self.here(name)
            host = "two" if self.current else "one"
            monkeypatch.setattr("areal_bus.storage.journal.socket.gethostname", lambda host=host: host)
            self.books[name] = Journal(folder / "journal", role=role, index=int(index), incarnation=0)

    def here(self, name: str) -> None:
        self.current = self.shift if name in ("generator-1", "reward-0") else 0.0

    def monotonic(self) -> float:
        return self.now + self.current

    def time(self) -> float:
        return 1e9 + self.now

    def write(self, who: str, event: Event, /, **fields: Any) -> None:
        self.here(who)
        self.books[who].write(event, **fields)

    def mark(self, name: str, label: str) -> None:
        self.here(name)
        self.books[name].mark(label)

    def run(self) -> None:
        """Four steps; the last prompt is refunded and a generator dies."""
        chance = random.Random(1)
        uid = 0
        for step in range(N_STEPS):
            uids = list(range(uid, uid := uid + N_GROUPS))
            for n, one in enumerate(uids):
                ids = {"uid": one, "attempt": 0}
                self.write("head-0", Event.ADMIT, uid=one, live=n + 1, in_training=0)
                self.write("head-0", Event.LEASE, **ids, holder=f"generator-{one % 2}.0")
            self.now += self.delay
            for one in uids:
                for sample in range(N_SAMPLES):
                    maker = f"generator-{one % 2}"
                    self.mark(maker, "generate")
                    self.write(maker, Event.REQUEST, uid=one, sample=sample, attempt=0)
            for one in uids:
                for sample in range(N_SAMPLES):
                    self._sample(step, one, sample, chance)
                self.write("head-0", Event.READY, uid=one)
            self._train(step, uids)
        self.write("head-0", Event.REFUND, uid=uid, reason="end_of_run", n_tokens_dropped=0)
        self.write("head-0", Event.MEMBER, name="generator-1.0", state="dead", why="silent")
        for name, book in self.books.items():
            self.here(name)
            book.close()

    def _sample(self, step: int, uid: int, sample: int, chance: random.Random) -> None:
        ids, maker = {"uid": uid, "sample": sample, "attempt": 0}, f"generator-{uid % 2}"
        for _ in range(20):  # short spans: none has its time in the journal
            self.now += chance.uniform(0.001, 0.015)
            self.mark(maker, "bus")
            self.now += 0.002
            self.mark(maker, "generate")
            self.books[maker].count_part("generate", "prefill", 0.0005)
        self.write(maker, Event.COMPLETION, **ids, n_tokens=8, finish="stop", versions=[step, 8])
        self.mark(maker, "idle:prompt")
        self.now += self.delay
        self.write("head-0", Event.SAMPLED, **ids, n_tokens=8)
        self.mark("reward-0", "score")
        self.now += 0.03
        self.write("reward-0", Event.SCORE, **ids, evaluation="", status="value", score_s=0.03, reward=1.0)
        self.mark("reward-0", "idle")
        self.now += self.delay
        self.write("head-0", Event.SCORED, **ids, evaluation="", status="value")

    def _train(self, step: int, uids: list[int]) -> None:
        self.write("head-0", Event.BATCH, step=step, clock=step, n_groups=N_GROUPS)
        for uid in uids:
            for sample in range(N_SAMPLES):
                self.write("head-0", Event.TRAJECTORY, step=step, clock=step, uid=uid, sample=sample, attempt=0)
        self.now += self.delay
        for label, seconds in (("prox", 0.05), ("backward", 0.4), ("optimizer", 0.03), ("wait_batch", 0.0)):
            self.mark("learner-0", label)
            self.now += seconds
        self.write("learner-0", Event.STEP, version=step + 1, update_s=0.43)
        self.now += self.delay
        self.write("head-0", Event.UPDATE, version=step + 1, u=step + 1, lag_mean=0.5, lag_max=1.0)
        self.write("head-0", Event.PUSH, push=step, version=step + 1, catch_up=False)
        self.now += self.delay + 0.1
        for name in ("generator-0", "generator-1"):
            self.write(name, Event.PUSHED, push=step, version=step + 1, receive_s=0.05, stall_s=0.01)
        self.now += self.delay
        self.write("head-0", Event.PUBLISH, version=step + 1)


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


def test_a_trajectory_flows_from_its_admission_to_the_next_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Out
) -> None:
    Ring(tmp_path, monkeypatch).run()
    trace = trace_of(tmp_path)
    flows = list(check_flows(trace).values())
    assert len(flows) == N_STEPS * N_GROUPS * N_SAMPLES
    first = ["admit 0", "sample 0.0", "score 0.0", "batch of version 1", "update 1", "push 0: version 1", "sample 4.0"]
    assert flows[0] == first
    assert flows[-1][:6] == ["admit 11", "sample 11.1", "score 11.1", "batch of version 4", "update 4",
                             "push 3: version 4"]  # fmt: skip
    assert {one["name"] for one in trace if one["ph"] == "i"} >= {"refund: end_of_run", "dead: generator-1.0"}
    counters = {one["name"] for one in trace if one["ph"] == "C"}
    assert counters >= {"live prompts", "ready groups", "lag (mean)", "lag (max)", "tokens/s", "memory (MiB)"}
    ready = [one["args"]["value"] for one in trace if one["name"] == "ready groups"]
    assert ready == [1, 2, 3, 0] * N_STEPS
    tracks = set(track_names(trace, "thread_name").values())
    assert tracks >= {"time", "admissions", "batches", "pushes", "updates", "slot 0", "slot 3", "score 0", "push"}
    assert "one: the clock of the head" in capsys.readouterr().out


def test_spans_nest_and_their_sums_are_those_of_the_breakdown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ring(tmp_path, monkeypatch, delay=0.003).run()
    trace = trace_of(tmp_path)
    check_nesting(trace)
    sums = label_sums(trace)
    for actor in read_all(Run(tmp_path)):
        assert sums[actor.name.partition(".")[0]] == pytest.approx(actor.spans, abs=2e-5)
    prefill_us = sum(one["dur"] for one in trace if one["name"] == "prefill")
    assert prefill_us == pytest.approx(500 * 20 * N_STEPS * N_GROUPS * N_SAMPLES, rel=0.01)
    long = [one for one in trace if one["name"] == "backward" and not one["args"]]
    assert [one["dur"] for one in long] == pytest.approx([400_000] * N_STEPS, abs=2)


@pytest.mark.parametrize("shift", [-5000.0, 0.25, 7e6])
def test_clocks_of_hosts_are_aligned_within_the_stated_error(
    shift: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ring(tmp_path, monkeypatch, shift=shift, delay=0.004).run()
    clocks = read_clocks(Run(tmp_path))
    first, second = clocks.all
    assert (first.host, first.offset_s, first.error_s) == ("one", 0.0, 0.0)
    assert second.error_s is not None
    assert second.error_s == pytest.approx(0.004, abs=1e-5)
    assert abs(second.offset_s + shift) <= second.error_s + 1e-6
    trace = trace_of(tmp_path)
    check_nesting(trace)
    assert all(flow[0].startswith("admit") and "score" in flow[2] for flow in check_flows(trace).values())


def test_a_window_and_a_step_leave_out_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ring(tmp_path, monkeypatch).run()
    whole = trace_of(tmp_path)
    part = trace_of(tmp_path, "--from", "1", "--to", "2.5")
    times = [one["ts"] for one in part if "ts" in one]
    assert 1e6 <= min(times) <= max(times) <= 2.5e6
    assert len(part) < len(whole)
    check_nesting(part)
    check_flows(part)
    step = trace_of(tmp_path, "--step", "2")
    flows = check_flows(step).values()
    assert sum("batch of version 2" in flow for flow in flows) == N_GROUPS * N_SAMPLES
    assert {one["name"] for one in step if one.get("cat") == "update"} == {"update 2"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--step", "9"],
            "unknown version --step 9: it names the version that an update made; the run has versions 1 to 4",
        ),
        (["--step", "1", "--from", "2"], "--step chooses the time itself: give it without --from and --to"),
        (["--from", "3", "--to", "2"], "--from must lie before --to and within the run of"),
        (["--output", "/nowhere/trace.json.gz"], "the trace must be writable: /nowhere/trace.json.gz: No such file"),
    ],
)
def test_a_bad_argument_ends_with_one_sentence(
    arguments: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ring(tmp_path, monkeypatch).run()
    with pytest.raises(ConfigError, match=sentence):
        command.main([str(tmp_path), *arguments])
    assert not list(tmp_path.glob("*.part"))


def test_a_run_without_a_head_or_of_another_schema_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Ring(tmp_path, monkeypatch).run()
    head = tmp_path / "journal" / "head-0.0.jsonl"
    text = head.read_text()
    head.write_text(text.replace('"schema":1', '"schema":0'))
    with pytest.raises(ConfigError, match=r"this version reads journals of schema 1: .* has schema 0"):
        command.main([str(tmp_path)])
    head.unlink()
    with pytest.raises(ConfigError, match="missing journal of the head"):
        command.main([str(tmp_path)])


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
