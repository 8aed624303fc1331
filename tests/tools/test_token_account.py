"""tools.report: where every sampled token went, and the length bias of what is trained."""

import json
import math
import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.staleness.simulator import ring as simulated
from areal_lab.staleness.simulator.generator import SimulatedGenerator
from areal_lab.staleness.simulator.sample import Key, SimulatedSample
from areal_lab.staleness.simulator.scenario import Scenario, ScenarioLengths, Tail, draw
from tests.tools.audit.forged_run import GENERATORS, true_run
from tests.tools.audit.forged_terms import crashed_run
from tests.tools.audit.test_simulated import Recorded, goes_back, journal
from tools.audit import run_settings
from tools.audit.audit import audit
from tools.follow import JournalFollower
from tools.report import __main__ as report
from tools.report.facts import token_account as fates
from tools.report.facts.length_bias import LengthBias, estimate, length_biases
from tools.report.facts.run_facts import read_facts
from tools.report.facts.sampling_time import SamplingTime
from tools.report.facts.token_account import FateRow, TokenAccount, fate_rows
from tools.run import Run
from tools.trackers.series import EVENTS, Row, SeriesReader

IN_BATCHES = {fates.TRAINED, fates.MASKED, fates.NO_GRADIENT}
BIAS = "rollout/length_bias"
Out = pytest.CaptureFixture[str]


def account_of(folder: Path) -> TokenAccount:
    account = TokenAccount(run_settings.read({"actor": {"advantage": "rloo"}}))
    for line in Run(folder).events(*fates.EVENTS):
        account.take(line)
    return account


def tokens_of(rows: Iterable[FateRow]) -> dict[str, int]:
    return {row.fate: row.n_tokens for row in rows if row.n_tokens}


# fates


def test_tokens_of_a_run_written_by_hand_have_the_fates_of_its_story(tmp_path: Path) -> None:
    """A generator is lost with a finished sample of prompt 5; group 9 meets a timeout; an evaluation has 3 answers."""
    forge = true_run()
    late = {"uid": 5, "sample": 1, "attempt": 0, "n_tokens": 5, "finish": "stop", "versions": [1, 5]}
    forge.write(GENERATORS[1], "completion", **late, n_forgotten=2)
    assert tokens_of(fate_rows(read_facts(Run(forge.save(tmp_path / "run"))).samples)) == {
        "trained": 54, "masked": 6, "without signal": 20, "reward_timeout": 5, "end_of_run": 5, "lost": 5,
        "begun anew": 2, "evaluation": 12,
    }  # fmt: skip


def test_tokens_that_later_terms_undo_are_told_apart(tmp_path: Path) -> None:
    rows = fate_rows(read_facts(Run(crashed_run().save(tmp_path / "run"))).samples)
    assert tokens_of(rows) == {"trained": 60, "without signal": 20, "undone": 70, "end_of_run": 5, "evaluation": 12}


@pytest.mark.slow
def test_fates_are_those_that_the_audit_derives_from_its_replay_of_the_ledger(tmp_path: Path) -> None:
    """Two readers of the same journals, under every policy and kind of fault."""
    seen: Counter[str] = Counter()
    for seed in [*range(60), *[seed for seed in range(200, 900) if goes_back(draw(seed))][:120]]:
        scenario = draw(seed)
        ring = Recorded(scenario)
        ring.run()
        folder = journal(tmp_path, scenario, ring)
        account = account_of(folder)
        told = tokens_of(fate_rows(account.samples()))
        head = audit(Run(folder)).head
        assert head is not None
        dropped = {reason: n for reason, n in head.tokens.dropped.items() if n}
        undone = dropped.pop("lost_timeline", 0) - head.tokens.found
        expected = dropped | ({fates.UNDONE: undone} if undone else {})
        assert {fate: n for fate, n in told.items() if fate not in {*IN_BATCHES, fates.IN_FLIGHT}} == expected, seed
        assert sum(told.get(fate, 0) for fate in {*IN_BATCHES, fates.IN_FLIGHT}) == (
            head.tokens.in_batches + head.tokens.waiting
        ), seed
        seen.update(told.keys())
    assert all(seen[fate] >= 3 for fate in ("trained", "undone", "reward_error", "no_signal", "end_of_run")), seen


def test_seconds_of_a_process_are_divided_by_time_in_flight_also_after_a_late_cancel() -> None:
    """Samples 0 and 1 live for 1 and 3 s, the second past the refund of its prompt; sample 2 is cancelled after 2 s."""
    time = SamplingTime()
    own = {"role": "generator", "rank": 0, "inc": 0, "attempt": 0}
    for wall, event, uid in ((0, "request", 0), (0, "request", 1), (0, "request", 2), (1, "completion", 0)):
        time.take({"event": event, "wall": wall, "uid": uid, "sample": 0, **own})
    time.take({"event": "spans", "wall": 2, "s_generate": 3.0, **own})
    for uid in (1, 2):
        time.take({"event": "refund", "wall": 2.5, "uid": uid, "role": "head"})
    time.take({"event": "completion", "wall": 3, "uid": 1, "sample": 0, **own})
    assert time.seconds() == ({("", 0, 0, 0): 0.5, ("", 1, 0, 0): 1.5, ("", 2, 0, 0): 1.0}, 0.0)


class Journaled(SimulatedGenerator):
    """Writes `request` and `completion` lines as the real one does."""

    lines: ClassVar[dict[str, list[dict[str, Any]]]] = {}

    def _write(self, event: str, key: Key, **fields: Any) -> None:
        evaluation, uid, attempt, sample = key
        ids = {"uid": uid, "sample": sample, "attempt": attempt} | ({"evaluation": evaluation} if evaluation else {})
        line = {"t": self.world.now, "wall": self.world.now, "term": self.timeline.term, "event": event}
        self.lines.setdefault(self.name, []).append(line | ids | fields)

    def _new(self, key: Key, n_tokens: int) -> SimulatedSample:
        sample = super()._new(key, n_tokens)
        self._write("request", key, **({"n_done": sample.n_done} if sample.n_done else {}))
        return sample

    def _finish(self, sample: SimulatedSample, n_starts: int) -> None:
        is_new = sample.key not in self.finished
        super()._finish(sample, n_starts)
        if is_new and sample.key in self.finished:
            self._write("completion", sample.key, n_tokens=sample.n_tokens, finish="stop", versions=[])


def save_generators(folder: Path, rng: random.Random) -> float:
    """The generators' files with a `spans` line every 5 s. Returns their seconds of `generate`."""
    total_s = 0.0
    for name, made in Journaled.lines.items():
        role, rank, inc = name.replace(".", "-").split("-")
        lines, last = [{"t": (at := made[0]["wall"]), "wall": at, "term": 0, "event": "start"}], made[-1]["wall"]
        while at < last - 5 or rng.random() < 0.5:  # one that is killed leaves seconds without a label
            at += 5
            lines.append({"t": at, "wall": at, "term": 0, "event": "spans", "s_generate": (s := rng.uniform(0, 5))})
            total_s += s
        lines = sorted([*lines, *made], key=lambda line: line["wall"])
        writer = {"role": role, "rank": int(rank), "inc": int(inc)}
        text = "".join(json.dumps(writer | line | {"seq": i}) + "\n" for i, line in enumerate(lines))
        (folder / "journal" / f"{name}.jsonl").write_text(text)
    return total_s


def sampled_tokens(ring: Recorded) -> int:
    """Each token once: of a finished sample that another generator continued without its last token, only that one."""
    made: dict[tuple[str, int, int], list[SimulatedSample]] = {}
    for generator in ring.witness.generators.values():
        for (evaluation, uid, _, number), sample in generator.finished.items():
            made.setdefault((evaluation, uid, number), []).append(sample)
    total = 0
    for samples in made.values():
        samples.sort(key=lambda sample: sample.key[2])
        total += sum(sample.n_tokens for sample in samples)
        for before, after in pairwise(samples):
            total -= min(after.n_done, before.n_tokens)
    return total


@pytest.mark.slow
def test_the_table_adds_up_to_all_tokens_and_seconds_of_simulated_rings_with_kills(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """I12: sampled = trained + masked + without signal + discarded by reason + in flight, by the generators' truth."""
    monkeypatch.setattr(simulated, "SimulatedGenerator", Journaled)
    seen: Counter[str] = Counter()
    for seed in [seed for seed in range(2000) if draw(seed).faults][:150]:
        Journaled.lines.clear()
        scenario = draw(seed)
        ring = Recorded(scenario)
        ring.run()
        for old in (tmp_path / "journal").glob("*"):
            old.unlink()
        folder = journal(tmp_path, scenario, ring)
        total_s = save_generators(folder, random.Random(seed))
        account = account_of(folder)
        rows = fate_rows(account.samples())
        assert sum(row.n_tokens for row in rows) == sampled_tokens(ring), seed
        assert sum(row.seconds for row in rows) == pytest.approx(total_s), seed
        assert all(row.n_tokens >= 0 and row.seconds >= 0 for row in rows), (seed, rows)
        finished = sum(len(generator.finished) for generator in ring.witness.generators.values())
        assert sum(row.n_samples for row in rows if row.fate != fates.UNFINISHED) == finished, seed
        seen.update(tokens_of(rows))
    assert all(seen[fate] > 0 for fate in (*IN_BATCHES, "lost", "undone", "too_old", "reward_error", "evaluation")), (
        seen
    )


# length bias


def write(folder: Path, *lines: dict[str, Any], role: str = "head") -> None:
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    envelope = {"term": 0, "role": role, "rank": 0, "inc": 0}
    text = "".join(
        json.dumps({"t": i, "wall": i, **envelope, "seq": i, **line}, separators=(",", ":")) + "\n"
        for i, line in enumerate(({"event": "start", "schema": 1}, *lines))
    )
    (folder / "journal" / f"{role}-0.0.jsonl").write_text(text)


def three_groups() -> list[dict[str, Any]]:
    """Groups of 2: one trained, one partly masked, one too old. And one that was open at the end."""
    lengths = {0: (10, 30), 1: (20, 60), 2: (50, 60), 3: (1, 1)}
    lines: list[dict[str, Any]] = []
    for uid, pair in lengths.items():
        lines += [{"event": "admit", "uid": uid, "source": "sums"}, {"event": "lease", "uid": uid, "attempt": 0}]
        for sample, n in enumerate(pair):
            ids: dict[str, Any] = {"uid": uid, "sample": sample, "attempt": 0}
            lines.append({"event": "scored", **ids, "n_tokens": n, "status": "value", "max_version": 0})
    for uid in (0, 1):
        for sample, n in enumerate(lengths[uid]):
            ids = {"step": 2, "clock": 2, "uid": uid, "sample": sample, "attempt": 0, "reward": float(sample)}
            masked = 20 if (uid, sample) == (1, 1) else 0
            spans = {"versions": [0, masked, 2, n - masked] if masked else [2, n]}
            lines.append({"event": "trajectory", **ids, "n_tokens": n, "n_masked": masked, "finish": "stop", **spans})
    lines += [{"event": "refund", "uid": 2, "reason": "too_old"}, {"event": "refund", "uid": 3, "reason": "end_of_run"}]
    return [*lines, {"event": "update", "version": 3, "n_tokens_trained": 100.0}]


def tracked(folder: Path) -> dict[str, float]:
    """The last value of each series of the length bias; the config of these runs is unknown."""
    reader = SeriesReader()
    rows = [item for line in JournalFollower(Run(folder), EVENTS).read() for item in reader.take(line)]
    found = {name: x for row in rows if isinstance(row, Row) for name, x in row.values.items()}
    return {name.removeprefix(BIAS): x for name, x in found.items() if name.startswith(BIAS)}


def test_the_bias_of_a_journal_written_by_hand_is_the_one_computed_by_hand(tmp_path: Path, capsys: Out) -> None:
    write(tmp_path / "run", *three_groups())
    assert report.main([str(tmp_path / "run"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {row["fate"]: row["n_tokens"] for row in told["tokens"] if row["n_tokens"]} == {
        "trained": 100, "masked": 20, "too_old": 110, "end_of_run": 2,
    }  # fmt: skip
    (found,) = told["length_bias"]
    assert (found["source"], found["n_groups"], found["n_sampled"], found["n_trained"]) == ("", 3, 6, 4)
    assert (found["mean_sampled"], found["mean_trained"]) == pytest.approx((230 / 6, 25))
    assert found["ratio"] == pytest.approx({"value": 15 / 23, "low": 0.2546, "high": 1.6703}, rel=1e-3)
    assert (found["long_from"], found["long_sampled"], found["long_trained"]) == pytest.approx((60, 12 / 23, 0.4))
    assert found["long_ratio"]["value"] == pytest.approx(0.4 * 23 / 12)
    assert tracked(tmp_path / "run") == pytest.approx({"": 15 / 23})


def test_the_interval_covers_the_truth_in_about_95_of_100_runs() -> None:
    """Half of the groups are dropped by a coin; samples of a group are alike, and groups are skewed."""
    rng, n_covered = random.Random(1), 0
    for _ in range(400):
        groups = []
        for _ in range(60):
            scale = rng.lognormvariate(3, 0.7)
            n = sum(scale * rng.lognormvariate(0, 0.5) for _ in range(4))
            is_kept = rng.random() < 0.5
            groups.append((n * is_kept, 4 * is_kept, n, 4))
        found = estimate(groups)
        assert found.low is not None
        assert found.high is not None
        n_covered += found.low <= 1 <= found.high
    assert 0.92 <= n_covered / 400 <= 0.98


def simulated_bias(folder: Path, policy: StalenessPolicy, seed: int) -> LengthBias:
    """Samples of a Pareto tail: now and then one takes a hundred times as long as the others."""
    tail = ScenarioLengths(Tail.PARETO, 2.0, 1.2, 2000)
    sizes: dict[str, Any] = {"batch_size": 2, "eta": 1, "n_samples": 2, "total_steps": 60, "n_generators": 2}
    scenario = Scenario(seed, policy, lengths=tail, n_rewards=2, patience_s=1e5, **sizes)
    ring = Recorded(scenario)
    assert not ring.run().violations
    found = length_biases(read_facts(Run(journal(folder, scenario, ring))).samples)[0]
    assert tracked(folder)[""] == pytest.approx(found.ratio.value, rel=0.05), "but for what is decided after the end"
    return found


@pytest.mark.parametrize("seed", range(3))
def test_long_answers_that_are_dropped_show_as_a_bias_and_nothing_dropped_as_none(seed: int, tmp_path: Path) -> None:
    """Row 32 of the fault matrix: the cost of dropping long answers is reported."""
    dropped = simulated_bias(tmp_path / "drop", StalenessPolicy.DROP, seed)
    assert dropped.ratio.high is not None
    assert dropped.ratio.value < dropped.ratio.high < 1
    assert dropped.long_ratio.value < 1
    kept = simulated_bias(tmp_path / "hold", StalenessPolicy.HOLD, seed)
    assert kept.ratio.low is not None
    assert kept.ratio.high is not None
    assert kept.ratio.low <= 1 <= kept.ratio.high
    assert math.isclose(kept.mean_sampled, kept.mean_trained)


def test_each_of_several_sources_has_its_bias_beside_that_of_all(tmp_path: Path) -> None:
    lines = three_groups()
    for line in lines:
        if line["event"] == "admit" and line["uid"] != 0:
            line["source"] = "words"
    write(tmp_path / "run", *lines)
    found = {one.source: one for one in length_biases(read_facts(Run(tmp_path / "run")).samples)}
    assert {name: one.ratio.value for name, one in found.items()} == pytest.approx(
        {"": 15 / 23, "sums": 1.0, "words": 30 / 47.5}
    )
    assert tracked(tmp_path / "run") == pytest.approx({"": 15 / 23, "/sums": 1.0, "/words": 30 / 47.5})


def test_an_undone_update_leaves_the_bias_and_its_samples_count_as_sampled(tmp_path: Path) -> None:
    """Group 1 is trained, undone and trained again without its longest sample; group 2 is erased."""
    *lines, update = three_groups()
    again = [line for line in lines if line["event"] == "trajectory" and line["uid"] == 1 and not line["sample"]]
    back = {"event": "term", "version": 2, "term": 1, "next_uid": 2, "open": [1], "kept": [[0]]}
    lines = [line for line in lines if line["event"] != "refund"] + [update, back]
    write(tmp_path / "run", *lines, *again, {"event": "update", "version": 3, "term": 1, "n_tokens_trained": 20.0})
    assert tracked(tmp_path / "run") == pytest.approx({"": 20 / ((10 + 30 + 20 + 60 + 50 + 60 + 1 + 1) / 8)})
