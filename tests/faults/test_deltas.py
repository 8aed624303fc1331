"""A ring whose pushes are deltas: a generator is killed in one, another one is away for some versions.

test_pushes.py has each phase.
"""

import signal
from pathlib import Path

import pytest

from tests.faults.ring import Ring

DELTAS = ("weights.delta_push=auto", "weights.route=gloo", "model.dtype=bfloat16", "actor.lr=1e-5")


@pytest.mark.soak
def test_a_ring_survives_a_kill_in_a_delta_and_the_killed_member_catches_up_by_one(tmp_path: Path) -> None:
    ring = Ring(tmp_path, "run.total_train_steps=10", *DELTAS)
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for_version(2, "generator-0.0", "generator-1.0")
        ring.set_failpoint("receive-landing", who="generator-0")
        ring.hold_learner(3)
        fault = ring.wait_for_failpoint("receive-landing")
        ring.wait_for_version(3, "generator-0.1", "generator-1.0")
        away = ring.kill("generator-1", signal.SIGSTOP)
        ring.wait_for("member", name="generator-1.0", state="dead", after=away.t)
        ring.hold_learner(6)
        ring.wait_for("publish", version=6)
        ring.resume_process(away.pid)
        ring.wait_for_version(6, "generator-1.0")
        ring.hold_learner(None)
        ring.finish()
    ring.check_survived()
    full, *deltas = ring.lines("pushed", role="generator", rank=1)
    assert "delta_from" not in full
    assert full["sent_bytes"] > 0
    assert {line["version"]: line["delta_from"] for line in deltas}[6] == 3, "from what it held, three versions ago"
    assert all(line["sent_bytes"] < full["sent_bytes"] / 2 for line in deltas)
    again = ring.lines("pushed", role="generator", rank=0, after=fault.t)
    assert [line.get("delta_from") for line in again] == [None, *(line["version"] for line in again[:-1])]
    sent = ring.lines("pushed", role="learner")
    assert {line.get("delta_from") for line in sent} >= {None, 0, 1, 3, 6}
