"""The whole job, or its learner at eta = 0, is killed and resumed. The run continues bit for bit."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from tests.faults.ring import CONFIG, INSIDE, ROOT, History, Ring
from tools.run import Line

STEPS = 8
SYNCHRONOUS = (
    f"run.total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=0",
    "rollout.max_concurrent_rollouts=6",
    "gconfig.n_samples=4",
    "actor.ppo_n_minibatches=2",
)


@dataclass(frozen=True)
class Resumed:
    """A run of two starts, and what a plain synchronous loop makes of the same settings."""

    ring: Ring
    killed: float  # the whole job
    history: History
    plain: dict[int, Line]  # version -> its line


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Resumed]:
    ring = Ring(tmp_path_factory.mktemp("resumed"), *SYNCHRONOUS)
    ring.hold_learner(4)
    with ring.started():
        ring.wait_for("publish", version=4)
        ring.wait_for("checkpoint", role="learner", step=4)
        sample_slowly_after(ring, 5)
        killed = ring.kill_all()
        run = ring.run
        ring.throttle(None)
        ring.hold_learner(None)
        ring.start("--resume", str(run))
        plain = reference(ring)
        ring.finish()
        assert ring.run == run
        yield Resumed(ring, killed, ring.check_survived(), plain)


def sample_slowly_after(ring: Ring, version: int) -> None:
    """Go on to this version, and return in the middle of the rollouts that follow it."""
    ring.throttle(0.3)
    ring.hold_learner(version)
    published = ring.wait_for("publish", version=version)
    ring.wait_for("request", role="generator", after=published["t"])


def reference(ring: Ring) -> dict[int, Line]:
    """What the plain loop in one process gives: a line a version."""
    return plain_loop(*(change for change in ring.changes if not change.startswith("checkpoint.")))


@cache
def plain_loop(*settings: str) -> dict[int, Line]:
    changes = [word for setting in settings for word in ("--set", setting)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{INSIDE}{os.pathsep}{ROOT}"}
    with TemporaryDirectory() as folder:
        out = Path(folder) / "reference"
        words = [
            sys.executable,
            "-m",
            "tools.offline.synchronous_reference",
            str(CONFIG),
            "--generators",
            "2",
            "--out",
            str(out),
        ]
        done = subprocess.run(
            [*words, *changes], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        lines = map(json.loads, (out / "reference.jsonl").read_text().splitlines())
        return {line["version"]: line for line in lines}


def differences(ring: Ring, plain: dict[int, Line]) -> dict[int, list[str]]:
    """For each version, of every term: the figures in which an update is not that of the plain loop."""
    found: dict[int, list[str]] = {}
    for line in ring.lines("update", role="head"):
        one = plain[line["version"]]
        differ = [key for key in one.keys() - {"update_s", "samples"} if one[key] != line.get(key)]
        if differ:
            found[line["version"]] = sorted(differ)
    return found


def batches(ring: Ring) -> dict[int, list[tuple[int, int, int]]]:
    """Of every step: its last batch, as (uid, sample, tokens) in order."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for line in ring.lines("batch", "trajectory", role="head"):
        if line["event"] == "batch":
            found[line["step"]] = []
        else:
            found[line["step"]].append((line["uid"], line["sample"], line["n_tokens"]))
    return found


def plain_batches(plain: dict[int, Line]) -> dict[int, list[tuple[int, int, int]]]:
    return {
        version - 1: [(x["uid"], x["sample"], x["n_tokens"]) for x in line["samples"]]
        for version, line in plain.items()
        if version
    }


@pytest.mark.slow
def test_row_13_kill_the_whole_job_and_resume(resumed: Resumed) -> None:
    """A second start goes on from the checkpoint; every prompt is trained once, and none is skipped."""
    ring = resumed.ring
    (term,) = [line for line in ring.lines("term") if line["t"] > resumed.killed]
    assert (term["term"], term["version"], term["next_uid"]) == (1, 4, 16)
    assert sorted(resumed.history.trained) == list(range(4 * STEPS))
    assert set(resumed.history.rows().values()) == {1}
    assert len({line["inc"] for line in ring.lines("start", role="head")}) == 2
    assert "resumes " in ring.output


@pytest.mark.slow
def test_a_job_that_was_killed_is_killed_in_mid_rollout(resumed: Resumed) -> None:
    """Or the test above would show less than it says."""
    ring = resumed.ring
    begun = {(x["uid"], x["sample"]) for x in ring.lines("request", role="generator", inc=0)}
    ended = {(x["uid"], x["sample"]) for x in ring.lines("completion", role="generator", inc=0)}
    assert begun - ended


@pytest.mark.slow
def test_at_eta_0_a_resumed_run_is_bit_equal_to_one_without_a_break(resumed: Resumed) -> None:
    """Weights, losses and all figures of every update, before the break and after it, and every batch."""
    assert sorted(resumed.plain) == list(range(STEPS + 1))
    assert differences(resumed.ring, resumed.plain) == {}
    assert len(set(resumed.history.digests.values())) == STEPS  # they do move
    assert batches(resumed.ring) == plain_batches(resumed.plain)


@pytest.mark.soak
def test_at_eta_0_a_run_whose_learner_was_killed_is_bit_equal_to_one_without(tmp_path: Path) -> None:
    ring = Ring(tmp_path, *SYNCHRONOUS)
    ring.set_failpoint("update", who="learner-0")
    with ring.started():
        first = ring.wait_for_failpoint("update")  # of the first update: the model is built again
        ring.hold_learner(3)
        ring.wait_for("update", version=3, after=first.t)
        ring.wait_for("checkpoint", role="learner", step=2, after=first.t)
        ring.set_failpoint("consumed")
        ring.hold_learner(None)
        second = ring.wait_for_failpoint("consumed", after=first.t)
        plain = reference(ring)
        ring.finish()
    ring.check_survived()
    terms = [(line["t"] > second.t, line["version"]) for line in ring.lines("term")]
    assert terms == [(False, 0), (False, 0), (True, 2)]
    assert differences(ring, plain) == {}
    assert batches(ring) == plain_batches(plain)


@pytest.mark.soak
def test_at_eta_0_an_extended_run_is_bit_equal_to_one_that_was_as_long_from_the_start(tmp_path: Path) -> None:
    ring = Ring(tmp_path, *SYNCHRONOUS)
    with ring.started("--set", "run.total_train_steps=3"):
        ring.finish()
        ring.start("--resume", str(ring.run))
        plain = reference(ring)
        ring.finish()
    ring.check_survived()
    assert differences(ring, plain) == {}
    assert batches(ring) == plain_batches(plain)
