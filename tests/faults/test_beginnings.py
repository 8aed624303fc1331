"""State of version 0 survives restarts of learner and head; a job drained at its start reports its progress."""

import json
import signal
from pathlib import Path

import pytest

from tests.faults.ring import Ring

pytestmark = pytest.mark.soak


def test_the_evaluation_before_is_made_once_though_learner_and_head_die_at_version_0(tmp_path: Path) -> None:
    settings = ("evaluate.before=true", "evaluate.limit=4", "evaluate.n_samples=2", "run.total_train_steps=4")
    ring = Ring(tmp_path, *settings)
    ring.hold_learner(0)
    with ring.started():
        before = ring.wait_for("evaluation", name="before")
        learner = ring.kill("learner-0")
        ring.wait_for("term", after=learner.t, version=0)
        ring.wait_for("member", name="generator-0.0", version=0, after=learner.t)
        head = ring.kill("head-0")
        ring.hold_learner(None)
        ring.wait_for("term", after=head.t, version=0, lives_on=False)
        ring.finish()
    ring.check_survived()
    assert ring.lines("evaluation", role="head") == [before]
    summary = json.loads((ring.run / "summary.json").read_text())
    assert summary["evaluations"]["before"]["n"] == 8


def test_a_resumed_job_drained_while_it_assembles_reports_its_version(tmp_path: Path) -> None:
    ring = Ring(tmp_path, "run.total_train_steps=9", "checkpoint.every_steps=2")
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for("update", version=2)
        ring.send(signal.SIGUSR1)
        ring.wait_until(lambda: "head: drains" in ring.output, "the head drains")
        ring.hold_learner(None)
        ring.finish()
    run = ring.run
    with ring.started("--resume", str(run)):
        ring.wait_for("start", role="head", inc=1)
        ring.send(signal.SIGUSR1)
        ring.finish()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["code"], summary["sentence"], summary["versions"]) == (0, "drained at version 2", 2)
    assert summary["checkpoint"] == str(run / "checkpoints" / "step-000002")
    assert summary["drained"]
