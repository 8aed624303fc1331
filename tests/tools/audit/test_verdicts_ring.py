"""A real ring whose reward function fails for some answers, under each policy for such scores."""

import json
from pathlib import Path

import pytest

from tests.test_tiny import ROOT, events, launch
from tools import samples
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.bench.eta0 import bench as eta0
from tools.run import Run

REWARD = """
import zlib

def score(prompt, completion, row):
    if zlib.crc32(completion.encode()) % 8 == 0:
        raise ValueError(f"cannot read {completion!r}")
    return sum(a == b for a, b in zip(completion, row["answer"]))
"""
COARSE = """
def score(prompt, completion, row):
    return float(completion[:1] == row["answer"][:1])
"""
STEPS = 5
SMALL = (f"run.total_train_steps={STEPS}", "learner.warmup.steps=20", "data.batch_size=8")


def flaky(folder: Path, config: str, *lines: str) -> str:
    """A config file whose reward raises for an eighth of the answers, the same ones each time."""
    (folder / "flaky.py").write_text(REWARD)
    reward = "\n".join(["[reward]", 'function = "flaky:score"', *lines])
    (folder / "flaky.toml").write_text(f'extends = "{ROOT / config}"\n{reward}\n')
    return str(folder / "flaky.toml")


def check_clean(run: Path) -> None:
    found = judge(audit(Run(run)))
    assert {name: one.why for name, one in found.items() if one.verdict is not InvariantVerdict.HOLDS} == {}


@pytest.mark.slow
def test_32_2_short_groups_are_trained_their_missing_named_and_the_failures_said(tmp_path: Path) -> None:
    run = launch(tmp_path, *SMALL, config=flaky(tmp_path, "configs/tiny.toml", "partial_groups = true"))
    check_clean(run)
    errors = {(x["uid"], x["sample"]) for x in events(run, "head-0.0", "scored") if x["status"] == "error"}
    trained = {(x["uid"], x["sample"]) for x in events(run, "head-0.0", "trajectory")}
    batches = events(run, "head-0.0", "batch")
    named = {pair for x in batches for pair in zip(x["missing"][::2], x["missing"][1::2], strict=True)}
    assert named
    assert named <= errors
    assert not errors & trained
    assert len(trained) + len(named) == STEPS * 8 * 8
    assert not [x for x in events(run, "head-0.0", "refund") if x["reason"] == "reward_error"]
    output = (tmp_path / "output.txt").read_text()
    assert output.count("scores failed (") == 2
    assert "ValueError: cannot read" in output
    summary = json.loads((run / "summary.json").read_text())
    assert 0.05 < summary["scores_failed"] / summary["scores"] < 0.3


@pytest.mark.slow
def test_32_2_at_eta_0_short_groups_are_those_of_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eta0, "CONFIG", flaky(tmp_path, eta0.CONFIG, "partial_groups = true"))
    monkeypatch.setattr(eta0, "CHANGES", [*eta0.CHANGES, f"run.total_train_steps={STEPS}"])
    run = eta0.ring(tmp_path, 1)
    likeness = eta0.compare(run, eta0.reference(tmp_path, 1), n_generators=1)
    assert (likeness.difference, likeness.n_same) == (None, STEPS)
    assert any("missing" in line for line in run.events("batch", role="head"))


@pytest.mark.slow
def test_at_eta_0_ppo_with_a_critic_is_that_of_the_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "critic.toml").write_text(
        f'extends = "{ROOT / eta0.CONFIG}"\n[actor]\nadvantage = "gae"\ngae_lambda = 0.9\n[critic]\nlr = 1e-3\n'
    )
    monkeypatch.setattr(eta0, "CONFIG", str(tmp_path / "critic.toml"))
    monkeypatch.setattr(eta0, "CHANGES", [*eta0.CHANGES, f"run.total_train_steps={STEPS}"])
    run = eta0.ring(tmp_path, 1)
    likeness = eta0.compare(run, eta0.reference(tmp_path, 1), n_generators=1)
    assert (likeness.difference, likeness.n_same) == (None, STEPS)
    assert all("value_loss" in line for line in run.events("update", role="head"))
    check_clean(run.folder)


@pytest.mark.slow
def test_at_eta_0_groups_without_signal_are_replaced_as_in_the_plain_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "coarse.py").write_text(COARSE)
    (tmp_path / "coarse.toml").write_text(
        f'extends = "{ROOT / eta0.CONFIG}"\n[reward]\nfunction = "coarse:score"\n[data]\nmax_refill = 5\n'
    )
    monkeypatch.setattr(eta0, "CONFIG", str(tmp_path / "coarse.toml"))
    monkeypatch.setattr(eta0, "CHANGES", [*eta0.CHANGES, f"run.total_train_steps={STEPS}"])
    run = eta0.ring(tmp_path, 2)
    likeness = eta0.compare(run, eta0.reference(tmp_path, 2), n_generators=2)
    assert (likeness.difference, likeness.n_same) == (None, STEPS)
    reasons = [line["reason"] for line in run.events("refund", role="head")]
    assert reasons.count("no_signal") > STEPS
    check_clean(run.folder)


@pytest.mark.slow
def test_32_2_a_declared_reward_is_trained_and_the_verdict_stays_an_error(tmp_path: Path) -> None:
    run = launch(tmp_path, *SMALL, config=flaky(tmp_path, "configs/tiny.toml", "on_error = -1.0"))
    check_clean(run)
    kept = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    failed = [line for line in kept if line["status"] == "error"]
    assert {line["reward"] for line in failed} == {-1.0}
    assert len(kept) == STEPS * 8 * 8
    assert "reward -1.000 (error)" in samples.render(failed[0], 100)
