"""Row 12: the head dies and the learner survives. Each update is made exactly once, whatever the learner was doing."""

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Fault, History, Line, Ring
from tests.faults.test_resume import (
    STEPS,
    SYNCHRONOUS,
    batches,
    differences,
    plain_batches,
    reference,
    sample_slowly_after,
)
from tools import run as runs

pytestmark = pytest.mark.soak  # test_deaths.py has a head that dies once

WITHOUT = "checkpoint.every_steps=0"  # no checkpoint but the last: whoever goes back begins at version 0


@dataclass(frozen=True)
class Outlived:
    """A run at eta = 0 whose head was killed twice, and a plain synchronous loop with the same settings."""

    ring: Ring
    waiting: Fault  # the learner waited for a batch then
    training: Fault
    learner: tuple[int, str]  # process id and name, at the beginning
    last: tuple[int, str]  # and when the last head was there
    history: History
    plain: dict[int, Line]  # version -> its line


@pytest.fixture(scope="module")
def outlived(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outlived]:
    ring = Ring(tmp_path_factory.mktemp("outlived"), *SYNCHRONOUS, WITHOUT)
    with ring.started():
        sample_slowly_after(ring, 2)
        ring.stop_sampling()  # no batch may be ready before the kill
        ring.hold_learner(None)
        learner = ring.actor("learner-0")
        waiting = ring.kill("head-0")
        ring.wait_for("term", inc=1)
        ring.set_failpoint("update", "lag", who="learner-0")
        ring.throttle(None)
        ring.wait_for_failpoint("update")
        training = ring.kill("head-0")
        ring.wait_for("term", inc=2)
        last = ring.actor("learner-0")
        plain = reference(ring)
        ring.finish()
        yield Outlived(ring, waiting, training, learner, last, ring.check_survived(), plain)


def made(ring: Ring) -> list[int]:
    """Versions in the order in which learner 0 made them, over all incarnations."""
    return [line["version"] for line in ring.lines("step", role="learner", rank=0)]


def lives(ring: Ring, role: str) -> int:
    return len(list(runs.Run(ring.run).journals(role)))


def test_row_12_a_learner_survives_heads_and_makes_every_update_once(outlived: Outlived) -> None:
    assert outlived.last == outlived.learner
    assert (lives(outlived.ring, "learner"), lives(outlived.ring, "head")) == (1, 3)
    assert made(outlived.ring) == list(range(1, STEPS + 1))


def test_a_term_begins_where_the_learner_is(outlived: Outlived) -> None:
    """An awaited batch is formed again; a received batch is trained, and the next head continues after it."""
    ring = outlived.ring
    assert [(x["inc"], x["version"], x["lives_on"]) for x in ring.lines("term", role="head")] == [
        (0, 0, False),
        (1, 2, True),
        (2, 3, True),
    ]
    steps = [(line["inc"], line["step"]) for line in ring.lines("batch", role="head")]
    assert steps == [(0, 0), (0, 1), (1, 2), *((2, step) for step in range(3, STEPS))]
    assert [line["version"] for line in ring.lines("update", role="head")] == [1, 2, *range(4, STEPS + 1)]
    for version in (2, 3):
        assert f"begins at version {version}" in ring.output
    assert "back to the last checkpoint" not in ring.output


def test_at_eta_0_a_run_whose_head_was_killed_is_bit_equal_to_one_without(outlived: Outlived) -> None:
    assert differences(outlived.ring, outlived.plain) == {}
    assert batches(outlived.ring) == plain_batches(outlived.plain)
    assert set(outlived.history.rows().values()) == {1}


def outlive(ring: Ring, n_steps: int, *, learners: int = 1) -> History:
    """Checks of a run in which only heads died."""
    ring.finish()
    history = ring.check_survived()
    assert lives(ring, "learner") == learners
    assert made(ring) == list(range(1, n_steps + 1))
    begun = [line["version"] for line in ring.lines("term", role="head")]
    assert begun == sorted(begun)
    assert [line["lives_on"] for line in ring.lines("term", role="head")] == [version > 0 for version in begun]
    return history


@pytest.mark.parametrize(
    ("eta", "every", "learners", "seed"), [(0, 0, 1, 1), (2, 0, 1, 2), (2, 2, 1, 3), (4, 1, 1, 4), (1, 0, 2, 5)]
)
def test_row_12_heads_that_are_killed_at_random_cost_no_update(
    tmp_path: Path, eta: int, every: int, learners: int, seed: int
) -> None:
    """Eight kills, each up to two seconds after the start of its term, or before it. All learner ranks outlive them."""
    dice, n_steps = random.Random(seed), 100
    ring = Ring(
        tmp_path,
        f"run.total_train_steps={n_steps}",
        f"rollout.max_head_offpolicyness={eta}",
        f"checkpoint.every_steps={every}",
        f"topology.learners={learners}",
        "launch.max_restarts=100",
        ranks=3 + learners,
    )
    ring.throttle(0.03)
    with ring.started():
        ring.wait_for("update", version=1)
        for life in range(8):
            ring.wait_for(dice.choice(["start", "term", "update", "batch", "joined"]), inc=life)
            time.sleep(dice.uniform(0.0, 2.0))  # the fault's own time: nothing is waited for
            ring.kill("head-0")
            ring.hold_learner(None)
        ring.throttle(None)
        outlive(ring, n_steps, learners=learners)
    assert lives(ring, "head") == 9


POINTS = (
    "consumed",  # the learner has a batch
    "snapshot",  # and the weights after it
    "push-announced",
    "push-met",
    "checkpoint-begun",
    "checkpoint-renamed",
)


def test_row_12_a_head_may_die_at_any_point_of_a_step_a_push_or_a_checkpoint(tmp_path: Path) -> None:
    n_steps = 24
    ring = Ring(tmp_path, f"run.total_train_steps={n_steps}")
    ring.throttle(0.02)
    with ring.started():
        for life, point in enumerate(POINTS):
            ring.wait_for("update", inc=life)
            ring.set_failpoint(point, "lag", who="learner-0")
            fault = ring.wait_for_failpoint(point, after=ring.wait_for("update", inc=life)["t"])
            ring.kill("head-0")
            ring.wait_for("term", inc=life + 1, after=fault.t)
        ring.throttle(None)
        outlive(ring, n_steps)


def test_a_finished_learner_survives_its_head_and_writes_no_second_checkpoint(tmp_path: Path) -> None:
    """All is trained and an evaluation runs: the next head repeats the evaluation and ends the job."""
    evaluation = ("evaluate.after=true", "evaluate.limit=8", "evaluate.n_samples=2")
    ring = Ring(tmp_path, "run.total_train_steps=4", WITHOUT, *evaluation)
    with ring.started():
        ring.throttle(0.05)
        ring.wait_for("checkpoint", role="learner", step=4)
        ring.wait_for("request", role="generator", evaluation="after")
        ring.kill("head-0")
        ring.wait_for("term", inc=1)
        ring.throttle(None)
        outlive(ring, 4)
    assert len(ring.lines("checkpoint", role="learner")) == 1
    assert len(ring.lines("evaluation", role="head", name="after")) == 1
    assert json.loads((ring.run / "summary.json").read_text())["code"] == 0
