"""`areal-bus chaos` on a real ring: faults, the end, and what it reports."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from areal_bus.errors import ConfigError
from areal_lab.chaos import __main__ as chaos
from areal_lab.chaos.chaos_job import ChaosJob
from areal_lab.chaos.chaos_outcome import ChaosOutcome, text_of
from areal_lab.chaos.chaos_run import ChaosPlan, ChaosRun
from areal_lab.chaos.ettr import TrainingShare
from areal_lab.chaos.fault_schedule import DEFAULT
from tools.run import Run

ROOT = Path(__file__).resolve().parents[3]
RING = ROOT / "tests" / "faults" / "ring.toml"
Out = pytest.CaptureFixture[str]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kinds", "seed"), [("kill,stop,cut", 2), pytest.param("rank,kill", 9, marks=pytest.mark.soak)]
)
def test_a_job_under_faults_loses_nothing_and_reports_what_they_cost(tmp_path: Path, kinds: str, seed: int) -> None:
    """With these seeds a fault of each kind is due within ten seconds. The end is drained, resumed and complete."""
    out = tmp_path / "run"
    line = [sys.executable, "-m", "areal_lab.chaos", str(RING), "-np", "4", "--kills-per-minute", "40", "--json"]
    line += ["--output", str(out), "--set", "reward.function=reverse", "--minutes", "0.2"]
    line += ["--faults", kinds, "--seed", str(seed)]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["trained_twice"], found["audit_broken"], found["failure"]) == (0, 0, [], "")
    assert {label.partition(" ")[0] for label in found["faults"]} == set(kinds.split(","))
    assert 0 < found["ettr"] < 1
    assert found["kills"] == sum(n for label, n in found["faults"].items() if label.startswith(("kill", "rank")))
    assert sum(one["n"] for one in found["recovery"].values()) + found["unrecovered"] == sum(found["faults"].values())
    versions = [line["version"] for line in Run(out).events("update", role="head")]
    assert found["updates_lost"] == len(versions) - len(set(versions))
    assert found["updates"] <= len(set(versions))
    assert done.stderr.count("s: kill ") == sum(n for label, n in found["faults"].items() if label.startswith("kill"))


def outcome(**changes: Any) -> ChaosOutcome:
    clean: dict[str, Any] = {
        "share": TrainingShare(30, 50.0, 1.5), "faults": {"kill head": 2, "stop reward": 1}, "n_kills": 2,
        "recovery": {"kill head": [2.0, 4.0]}, "n_unrecovered": 1, "n_undone": 3, "n_lost": 0, "n_twice": 0,
        "broken": {}, "failure": "",
    }  # fmt: skip
    return ChaosOutcome(**clean | changes)


def test_an_outcome_has_the_figures_of_each_kind_of_fault() -> None:
    shown = "\n".join(text_of(outcome()))
    assert "ETTR 90.0%: 30 updates in 50 s, of which 5 s are lost" in shown
    assert "kill head    2             3.0 s  4.0 s" in shown
    assert "stop reward  1                 -      -" in shown
    found = outcome().as_json()
    assert (found["ettr"], found["kills"], found["updates_lost"]) == (0.9, 2, 3)
    assert found["recovery"] == {"kill head": {"n": 2, "median_s": 3.0, "max_s": 4.0}}


@pytest.mark.parametrize(
    "changes", [{"n_lost": 1}, {"n_twice": 1}, {"broken": {"I4": "why"}}, {"failure": "the job failed", "n_lost": None}]
)
def test_an_outcome_is_a_finding_when_something_is_lost_or_repeated_or_broken(changes: dict[str, Any]) -> None:
    assert outcome().is_clean
    assert not outcome(**changes).is_clean


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (["--kills-per-minute", "0"], "invalid number '0'"),
        (["--minutes", "inf"], "invalid number 'inf'"),
        (["--faults", "kill,flood"], "unknown kind 'flood': it is one of kill, stop, cut, rank"),
    ],
)
def test_a_wrong_word_is_refused_with_the_rule(words: list[str], fault: str, capsys: Out) -> None:
    with pytest.raises(SystemExit) as ended:
        chaos.main(["tiny", *words])
    assert ended.value.code == 2
    assert fault in capsys.readouterr().err


def test_a_number_of_ranks_that_the_topology_refuses_and_a_folder_that_exists_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few ranks: 2 started"):
        chaos.main([str(RING), "-np", "2"])
    with pytest.raises(ConfigError, match="--output must be a new folder"):
        chaos.main([str(RING), "--output", str(tmp_path)])


def test_a_job_that_ends_before_any_fault_is_too_short(tmp_path: Path) -> None:
    never_disturbed = ChaosRun(
        ChaosJob(RING, [], ranks=4, run=tmp_path / "run"),
        ChaosPlan(DEFAULT, 1.0, None, 1),
        lambda _: None,
        lambda _: None,
    )
    with pytest.raises(ConfigError, match="too short a run: it ended after 0 updates, before any fault"):
        chaos.check_length(never_disturbed)


@pytest.mark.slow
def test_a_job_that_does_not_start_is_wrong_input(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "areal_lab.chaos", str(RING), "-np", "4", "--output", str(tmp_path / "run")]
    line += ["--set", "reward.function=nowhere:score"]
    done = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: failed start: the job failed, exit code 2: ")
