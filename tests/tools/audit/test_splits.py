"""tools.audit checks the split of ranks: each rule is broken by one forged line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.invariants.test_splits import changing
from tests.tools.audit.test_simulated import Recorded, journal
from tools.audit.audit import audit
from tools.audit.findings import Findings
from tools.audit.journal_reader import JournalFile
from tools.audit.replay.clock import Clock
from tools.audit.replay.members import Members, Splits
from tools.audit.run_settings import read
from tools.run import Run

Line = dict[str, Any]
SEED = 3  # without faults: two learners and three generators, two changes


@pytest.fixture
def run(tmp_path: Path) -> Path:
    plan = changing(SEED, is_rough=False)
    ring = Recorded(plan)
    assert not ring.run().violations
    return journal(tmp_path, plan, ring)


def forge(run: Path, change: Callable[[Line], None], event: str, **wanted: Any) -> list[str]:
    """Change the first such line of the head; the texts of I6 that the audit finds."""
    path = run / "journal" / "head-0.0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(next(x for x in lines if x["event"] == event and all(x.get(k) == v for k, v in wanted.items())))
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    return [finding.text for finding in audit(Run(run)).findings.first.get("I6", [])]


def test_the_journal_of_a_ring_whose_split_changes_is_clean(run: Path) -> None:
    assert not audit(Run(run)).findings.first


@pytest.mark.parametrize(
    ("changes", "why", "text"),
    [
        ({"split": 4}, "change", "splits are numbered in order"),
        ({"version": 99}, "change", "the split changes between two updates: at version 99"),
        ({"learners": 9, "generators": 1}, "change", "a batch goes to all learner ranks"),
        ({"generators": 0}, "start", "a member has a place in the split: generator-"),
    ],
)
def test_a_split_line_that_contradicts_the_others_is_found(
    run: Path, changes: dict[str, int], why: str, text: str
) -> None:
    found = forge(run, lambda line: line.update(changes), "split", why=why)
    assert any(text in one for one in found), found


def test_a_lease_to_a_generator_whose_rank_learns_is_found(run: Path) -> None:
    lines = [json.loads(line) for line in (run / "journal" / "head-0.0.jsonl").read_text().splitlines()]
    split = next(line for line in lines if line["event"] == "split" and line["why"] == "change")
    lease = next(line for line in lines if line["event"] == "lease" and line["seq"] > split["seq"])
    gone = f"generator-{split['most_generators'] - 1}.0"
    found = forge(run, lambda line: line.update(holder=gone), "lease", seq=lease["seq"])
    assert any(f"a holder of prompts has a place in the split: {gone} has none" in one for one in found), found


@pytest.mark.parametrize(("is_fixed_between", "n"), [(True, 0), (False, 1)])
def test_split_numbers_restart_only_after_a_start_with_a_fixed_split(
    tmp_path: Path, is_fixed_between: bool, n: int
) -> None:
    """A head had [topology.adapt] and split 2; the last one begins with split 0."""
    file, settings = JournalFile(tmp_path / "head-0.0.jsonl", Findings()), read({})
    splits = Splits(file, Clock(settings, file), Members(file))
    line = {"why": "start", "version": 0, "learners": 1, "generators": 2, "most_generators": 2}
    splits.begin(line | {"split": 2})
    for _ in range(1 + is_fixed_between):
        splits.begin_life()
    splits.begin(line | {"split": 0})
    assert file.findings.n["I6"] == n
