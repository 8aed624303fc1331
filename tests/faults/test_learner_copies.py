"""Row 9: a learner rank dies and comes back from the copy that its supervisor holds: no update is undone."""

import random
import time
from pathlib import Path

import pytest

from tests.faults.ring import SPAWN, History, Ring
from tests.faults.test_resume import SYNCHRONOUS, batches, differences, plain_batches, reference

WITHOUT = "checkpoint.every_steps=0"  # no checkpoint but the last
ENDURING = "launch.max_restarts=100"


def undone(ring: Ring) -> list[int]:
    """Versions that the head received more than once."""
    made = [line["version"] for line in ring.lines("update", role="head")]
    return sorted({version for version in made if made.count(version) > 1})


def finish_without_loss(ring: Ring, n_kills: int) -> History:
    ring.finish(timeout_s=240)
    history = ring.check_survived()
    terms = ring.lines("term", role="head")[1:]
    assert len(terms) == n_kills
    assert {(line["lives_on"], line["restored"]) for line in terms} == {(True, True)}
    assert undone(ring) == []
    assert set(history.rows().values()) == {1}
    return history


@pytest.mark.slow
def test_row_09_a_dead_learner_comes_back_from_memory_and_the_run_is_bit_equal(tmp_path: Path) -> None:
    """At eta = 0, three times: while it waits, in an update, and between its copy and the report of the update."""
    ring = Ring(tmp_path, *SYNCHRONOUS, WITHOUT, *SPAWN, copies=True)
    with ring.started():
        ring.wait_for("update", version=2)
        points = ("consumed", "update", "copied")
        for life, point in enumerate(points):
            ring.set_failpoint(point, who="learner-0")
            fault = ring.wait_for_failpoint(point)
            assert fault.name == f"learner-0.{life}"
            ring.wait_for("term", after=fault.t)
            ring.wait_for("update", after=fault.t)
        plain = reference(ring)
        finish_without_loss(ring, len(points))
    assert differences(ring, plain) == {}
    assert batches(ring) == plain_batches(plain)


@pytest.mark.slow
def test_row_09_two_learner_ranks_come_back_to_the_version_that_both_have(tmp_path: Path) -> None:
    """Rank 1 dies while it writes its copy: rank 0 has a newer one, which no head has received."""
    ring = Ring(tmp_path, "run.total_train_steps=14", "topology.learners=2", WITHOUT, ENDURING, ranks=5, copies=True)
    with ring.started():
        ring.wait_for("update", version=2)
        for point in ("copying", "update"):
            ring.set_failpoint(point, who="learner-1")
            fault = ring.wait_for_failpoint(point)
            ring.wait_for("term", after=fault.t)
            ring.wait_for("update", after=fault.t)
        finish_without_loss(ring, 2)


@pytest.mark.soak
def test_row_09_two_learner_ranks_come_back_to_a_version_that_is_on_disk_too(tmp_path: Path) -> None:
    """Both find it there: one that did not would write it again, alone, and wait for the other for ever."""
    changes = ("run.total_train_steps=8", "topology.learners=2", "checkpoint.every_steps=1", ENDURING)
    ring = Ring(tmp_path, *changes, "checkpoint.async_save=false", ranks=5, copies=True)
    with ring.started():
        ring.wait_for("checkpoint", role="learner", step=2)
        ring.set_failpoint("update", who="learner-1")
        fault = ring.wait_for_failpoint("update")
        ring.wait_for("update", after=fault.t)
        finish_without_loss(ring, 1)


@pytest.mark.slow
def test_an_update_that_fails_each_time_ends_the_job(tmp_path: Path) -> None:
    """Coming back to the same version is no progress. After three crashes the copy is dropped."""
    ring = Ring(tmp_path, "checkpoint.every_steps=2", "launch.max_restarts=4", copies=True)
    with ring.started():
        ring.wait_for("checkpoint", role="learner", step=4)
        ring.set_failpoint("update", who="learner-0", n=20)
        ring.finish(code=1)
    assert len(ring.failpoint_hits("update")) == 5
    texts = [line["text"] for line in ring.lines("note", role="learner") if line["text"].startswith("begins at")]
    assert ["memory" in text for text in texts] == [True, True, False, False]
    ring.check_survived(ended=False)


@pytest.mark.soak
def test_fifty_deaths_of_a_learner_undo_no_update(tmp_path: Path) -> None:
    dice, n_steps = random.Random(50), 160
    ring = Ring(tmp_path, *SYNCHRONOUS[1:], f"run.total_train_steps={n_steps}", WITHOUT, ENDURING, copies=True)
    with ring.started():
        ring.wait_for("update", version=1)
        for _ in range(50):
            fault = ring.kill("learner-0")
            ring.wait_for("term", after=fault.t)
            ring.wait_for("update", after=fault.t)
            time.sleep(dice.uniform(0.0, 0.3))  # the fault's own time: nothing is waited for
        plain = reference(ring)
        finish_without_loss(ring, 50)
    assert differences(ring, plain) == {}


@pytest.mark.soak
@pytest.mark.parametrize(("eta", "learners", "seed"), [(1, 1, 1), (3, 2, 2)])
def test_heads_and_learners_that_die_in_any_order_undo_no_update(
    tmp_path: Path, eta: int, learners: int, seed: int
) -> None:
    dice, n_steps = random.Random(seed), 80
    ring = Ring(
        tmp_path,
        f"run.total_train_steps={n_steps}",
        f"rollout.max_head_offpolicyness={eta}",
        f"topology.learners={learners}",
        WITHOUT,
        ENDURING,
        ranks=3 + learners,
        copies=True,
    )
    ring.throttle(0.03)
    with ring.started():
        ring.wait_for("update", version=1)
        for _ in range(10):
            victims = dice.choice([["head-0"], ["learner-0"], [f"learner-{learners - 1}"], ["head-0", "learner-0"]])
            died = max(ring.kill(who).t for who in victims)
            ring.wait_for("term", after=died)
            ring.wait_for(dice.choice(["term", "update"]), after=died)
            time.sleep(dice.uniform(0.0, 1.5))  # the fault's own time: nothing is waited for
        ring.throttle(None)
        ring.finish(timeout_s=240)
    ring.check_survived()
    assert undone(ring) == []
