"""A real ring whose reward function fails for some answers, under each policy for such scores."""

import json
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.eta0 import bench as eta0
from tests.test_tiny import ROOT, launch
from tools import samples
from tools.audit.audit import audit, judge
from tools.audit.findings import InvariantVerdict
from tools.run import Run

pytestmark = pytest.mark.soak

REWARD = """
import zlib

def score(prompt, completion, row):
    if zlib.crc32(completion.encode()) % 8 == 0:
        raise ValueError(f"cannot read {completion!r}")
    return float(completion[:1] == row["answer"][:1])
"""
EVERYTHING = """
partial_groups = true

[data]
max_refill = 5

[actor]
advantage = "gae"
gae_lambda = 0.9
kl_ctl = 0.04
kl_in = "loss"
kl_estimator = "k3"

[critic]
lr = 1e-3
"""
STEPS, GROUPS, SAMPLES = 5, 8, 4
FEW_ROWS = "data.limit=1000"


def flaky(folder: Path, config: str, more: str) -> str:
    """A config file whose reward raises for an eighth of the answers, the same ones each time."""
    (folder / "flaky.py").write_text(REWARD)
    reward = f'[reward]\nfunction = "flaky:score"\n{more}'
    (folder / "flaky.toml").write_text(f'extends = "{ROOT / config}"\n{reward}\n')
    return str(folder / "flaky.toml")


def check_clean(run: Path) -> None:
    found = judge(audit(Run(run)))
    assert {name: one.why for name, one in found.items() if one.verdict is not InvariantVerdict.HOLDS} == {}


@pytest.fixture(scope="module")
def equal(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run at eta = 0 with everything that is not the policy alone, equal to the plain loop's."""
    folder = tmp_path_factory.mktemp("equal")
    config, changes = flaky(folder, eta0.CONFIG, EVERYTHING), (f"run.total_train_steps={STEPS}", FEW_ROWS)
    run = eta0.ring(folder, 2, config=config, changes=changes)
    plain = eta0.reference(folder, 2, config=config, changes=changes)
    likeness = eta0.compare(run, plain, n_generators=2)
    assert (likeness.difference, likeness.n_same) == (None, STEPS)
    return run


def test_at_eta_0_short_groups_are_those_of_the_plain_loop_and_their_missing_named(equal: Run) -> None:
    check_clean(equal.folder)
    errors = {(x["uid"], x["sample"]) for x in equal.events("scored", role="head") if x["status"] == "error"}
    trained = {(x["uid"], x["sample"]) for x in equal.events("trajectory", role="head")}
    batches = list(equal.events("batch", role="head"))
    named = {pair for x in batches for pair in zip(x["missing"][::2], x["missing"][1::2], strict=True)}
    assert named
    assert named <= errors
    assert not errors & trained
    assert len(trained) + len(named) == STEPS * GROUPS * SAMPLES
    n_errors = Counter(uid for uid, _ in errors)
    refunded = [x["uid"] for x in equal.events("refund", role="head") if x["reason"] == "reward_error"]
    assert all(n_errors[uid] > SAMPLES - 2 for uid in refunded), "two rewards make a group"
    assert 0.05 < equal.summary()["scores_failed"] / equal.summary()["scores"] < 0.3


def test_at_eta_0_groups_without_signal_are_replaced_as_in_the_plain_loop(equal: Run) -> None:
    reasons = [line["reason"] for line in equal.events("refund", role="head")]
    assert reasons.count("no_signal") > STEPS


def test_at_eta_0_critic_and_reference_model_are_those_of_the_plain_loop(equal: Run) -> None:
    updates = list(equal.events("update", role="head"))
    assert len(updates) == STEPS
    assert all("value_loss" in line for line in updates)
    assert all(line["kl_ref"] > 0 for line in updates[1:])


def test_a_declared_reward_is_trained_and_the_verdict_stays_an_error(tmp_path: Path) -> None:
    changes = (f"run.total_train_steps={STEPS}", "learner.warmup.steps=20", f"data.batch_size={GROUPS}", FEW_ROWS)
    run = launch(tmp_path, *changes, config=flaky(tmp_path, "configs/tiny.toml", "on_error = -1.0"), ranks=3)
    check_clean(run)
    kept = [json.loads(line) for line in (run / "samples" / "samples.jsonl").read_text().splitlines()]
    failed = [line for line in kept if line["status"] == "error"]
    assert {line["reward"] for line in failed} == {-1.0}
    assert len(kept) == STEPS * GROUPS * 8
    assert "reward -1.000 (error)" in samples.render(failed[0], 100)
    output = (tmp_path / "output.txt").read_text()
    assert output.count("scores failed (") == 2
    assert "ValueError: cannot read" in output
