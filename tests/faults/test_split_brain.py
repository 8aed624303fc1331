"""Row 26: two learners at once. An epoch has one learner; the older one is sent Stop and changes nothing."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from actors.runtime.context import Context
from launch.plan.environment import actor_environment
from tests.faults.ring import FOLDER, INSIDE, ROOT, Fault, Ring

pytestmark = pytest.mark.soak


@dataclass(frozen=True)
class Second:
    """A learner that no supervisor of the job has started."""

    process: "subprocess.Popen[bytes]"
    output: Path

    @staticmethod
    def start(ring: Ring, like: str, incarnation: int) -> "Second":
        """With another learner's context, except its incarnation."""
        context = Context.from_json((ring.folder / f"context-{like}.json").read_text())
        context = replace(context, incarnation=incarnation)
        outer = os.environ | {FOLDER: str(ring.folder), "PYTHONPATH": str(INSIDE)}
        output = ring.folder / f"second-{incarnation}.txt"
        with output.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "actors.runtime.start"],
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=file,
                cwd=ROOT,
                env=actor_environment(outer, gpus=(), cpu=True),
            )
        assert process.stdin is not None
        process.stdin.write(context.to_json().encode() + b"\n")
        process.stdin.flush()
        return Second(process, output)

    def finish(self) -> int:
        """Its exit code."""
        code = self.process.wait(60)
        assert self.process.stdin is not None
        self.process.stdin.close()
        return code


@pytest.fixture
def ring(tmp_path: Path) -> Iterator[Ring]:
    ring = Ring(
        tmp_path, "run.total_train_steps=12", "weights.route=gloo"
    )  # by which a member waits for the root to the end
    ring.hold_learner(3)
    with ring.started():
        ring.wait_for("update", version=3)
        ring.wait_for("publish", version=3)
        ring.wait_for("checkpoint", role="learner", step=2)  # it is written beside training
        ring.wait_for_version(3, "generator-0.0", "generator-1.0")
        yield ring


def test_row_26_an_older_learner_is_sent_stop_and_changes_nothing(ring: Ring) -> None:
    fault = ring.kill("learner-0")
    ring.wait_for("term", after=fault.t)
    ring.wait_for("update", version=3, after=fault.t)
    second = Second.start(ring, fault.name, 0)
    assert second.finish() == 0
    refused = [x for x in ring.lines("refused", role="head", after=fault.t) if x["sender"] == fault.name]
    assert [line for line in refused if line["what"] == "Join"]
    assert len(ring.lines("term", role="head")) == 2
    ring.hold_learner(None)
    ring.finish()
    ring.check_survived()
    assert {x["inc"] for x in ring.lines("step", role="learner", after=fault.t)} == {1}


@pytest.mark.parametrize("when", ["between pushes", "in a push"])
def test_row_26_a_learner_that_was_replaced_while_it_stood_still_ends_when_it_goes_on(ring: Ring, when: str) -> None:
    """A second supervisor starts it. The ring follows the newer learner, and no push waits for the older one."""
    old = stop(ring, when)
    second = Second.start(ring, old.name, 1)
    term = ring.wait_for("term", after=old.t)
    assert term["version"] == 2
    ring.hold_learner(6)
    ring.wait_for("update", version=6, after=term["t"], timeout_s=40)
    resumed = ring.resume_process(old.pid)
    ring.wait_until(lambda: not Path(f"/proc/{old.pid}").exists(), "the old learner ends")
    ring.hold_learner(None)
    ring.finish()
    assert second.finish() == 0
    ring.check_survived()
    mine = [x for x in ring.lines(role="learner", inc=0, after=resumed) if x["event"] in ("step", "checkpoint")]
    assert mine == []
    assert len(ring.lines("term", role="head")) == 2
    refused = [x for x in ring.lines("refused", role="head", after=resumed) if x["sender"] == old.name]
    assert refused
    assert json.loads((ring.run / "summary.json").read_text())["versions"] == 12


def stop(ring: Ring, when: str) -> Fault:
    """The learner is stopped while idle, or as the root of a push that a generator waits for."""
    if when == "between pushes":
        return ring.kill("learner-0", signal.SIGSTOP)
    now = time.monotonic()
    ring.set_failpoint("push-met", "stop", who="learner-0")
    ring.kill("generator-0")  # its next life gets a catch-up push
    return ring.wait_for_failpoint("push-met", after=now)
