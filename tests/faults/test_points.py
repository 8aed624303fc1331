"""Rows 9, 10 and 12: learner and head of one job are killed at each point of a step, of a push and of a checkpoint.

The learner between taking a batch and the end of its checkpoint, without a copy of its state in memory; then the head
between deciding, writing and sending.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_bus.storage import versioned_dirs
from tests.faults.ring import Fault, History, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

STEPS = 120
EVERY = 2

UPDATE = ("consumed", "update", "snapshot", "updated", "announced")  # from a batch to the word of its update
PUSH = ("push-announced", "push-met", "push-reported")  # from there to its publication
CHECKPOINT = ("checkpoint-begun", "checkpoint-files", "checkpoint-sync")  # before the new one has its name
SEALED = ("checkpoint-renamed", "checkpoint-prune", "checkpoint-discard")  # it has
LEARNER = (*UPDATE, *PUSH, *CHECKPOINT, *SEALED)
HEAD = ("head-updated", "frontier", "frontier-saved", "term")


@dataclass(frozen=True)
class Crash:
    """One failpoint: the state at the kill, and where the job went on."""

    fault: Fault
    sealed: int  # newest version whose checkpoint the learner had said to be whole
    reached: int  # newest update that the head knew: the word of the last one may be lost with the learner
    term: Line  # the next one


@dataclass(frozen=True)
class CrashedRing:
    ring: Ring
    crashes: dict[str, Crash]
    history: History


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashedRing]:
    ring = Ring(
        tmp_path_factory.mktemp("points"),
        f"run.total_train_steps={STEPS}",
        "bus.silent_s=3",
        "checkpoint.async_save=false",  # else an update and a checkpoint may end in either order
    )
    ring.hold_learner(3)
    crashes: dict[str, Crash] = {}
    with ring.started():
        for point in (*LEARNER, *HEAD):
            crashes[point] = crash(ring, point, list(crashes.values())[-1:])
        ring.hold_learner(None)
        ring.finish()
        yield CrashedRing(ring, crashes, ring.check_survived())


def crash(ring: Ring, point: str, before: list[Crash]) -> Crash:
    """Once the ring has made an update between two checkpoints: the next time that learner or head is at this point."""
    since: Line = before[0].term if before else {"t": 0.0, "version": 0}
    odd = int(since["version"]) + 3 - int(since["version"]) % EVERY
    ring.hold_learner(odd)
    ring.wait_for("update", version=odd, after=since["t"])
    sealed = ring.wait_for("checkpoint", role="learner", step=odd - 1, after=since["t"])
    ring.set_failpoint(point, who="learner-0" if point in LEARNER else "head-0")
    if point == "term":
        ring.kill("learner-0")  # whose next life begins one
    else:
        ring.hold_learner(odd + 2 * EVERY)
    fault = ring.wait_for_failpoint(point, after=since["t"])
    term = ring.wait_for("term", after=fault.t)
    done = [line["step"] for line in ring.lines("checkpoint", role="learner", after=since["t"]) if line["t"] < fault.t]
    updates = [line["version"] for line in ring.lines("update", after=since["t"]) if line["t"] < term["t"]]
    return Crash(fault, max([sealed["step"], *done]), updates[-1], term)


def went_on(crashed: CrashedRing, point: str) -> Crash:
    """The next update is that of the batch at which the new term began."""
    one = crashed.crashes[point]
    assert crashed.ring.lines("batch", after=one.term["t"])[0]["step"] == one.term["version"]
    assert crashed.ring.lines("update", role="head", after=one.term["t"])[0]["version"] == one.term["version"] + 1
    return one


@pytest.mark.parametrize("point", [*UPDATE, *PUSH])
def test_row_09_kill_learner_between_consume_and_publish(crashed: CrashedRing, point: str) -> None:
    """The batch is trained once in the history that survives, from the checkpoint before it."""
    one = went_on(crashed, point)
    assert one.fault.name.startswith("learner-0.")
    assert one.term["version"] == one.sealed
    assert one.reached >= one.sealed


@pytest.mark.parametrize("point", CHECKPOINT)
def test_row_10_kill_learner_while_it_writes_a_checkpoint(crashed: CrashedRing, point: str) -> None:
    """The previous checkpoint is used: one without its final name is ignored."""
    one = went_on(crashed, point)
    assert one.sealed + EVERY - one.reached in (0, 1)  # it was about to write that one
    assert one.term["version"] == one.sealed


@pytest.mark.parametrize("point", SEALED)
def test_row_10_kill_learner_when_a_checkpoint_has_its_name(crashed: CrashedRing, point: str) -> None:
    """It is complete, even if nobody was informed."""
    one = went_on(crashed, point)
    assert one.term["version"] - one.reached in (0, 1)
    assert one.term["version"] % EVERY == 0


@pytest.mark.parametrize("point", HEAD)
def test_row_12_kill_head_between_deciding_writing_and_telling(crashed: CrashedRing, point: str) -> None:
    """The next head goes on where the learner is; or from the checkpoint where the learner has begun a term that its
    head could not write down.
    """
    one = went_on(crashed, point)
    version = one.term["version"]
    if point == "term":
        assert not one.term["lives_on"]
        assert version % EVERY == 0
        assert one.reached - EVERY <= version <= one.reached
    else:
        assert one.term["lives_on"]
        assert one.reached <= version <= one.reached + 1


def test_after_all_those_deaths_every_prompt_is_trained_once_and_all_checkpoints_are_whole(
    crashed: CrashedRing,
) -> None:
    ring = crashed.ring
    assert set(crashed.history.rows().values()) == {1}
    terms = [line["term"] for line in ring.lines("term", role="head")]
    assert terms == sorted(set(terms)), "each term is begun once; one that was written and never announced is skipped"
    assert json.loads((ring.run / "term.json").read_text())["term"] == terms[-1] > len(crashed.crashes)
    shelves = versioned_dirs.versions(ring.run / "checkpoints")
    assert max(shelves) == STEPS
    for path in shelves.values():
        versioned_dirs.verify(path)
    assert {path.name for path in (ring.run / "checkpoints").iterdir()} == {path.name for path in shelves.values()}
    lives = {role: len(list(runs.Run(ring.run).journals(role))) for role in ("learner", "head")}
    assert lives == {"learner": 2 + len(LEARNER), "head": 1 + len(HEAD)}


@pytest.mark.parametrize(("point", "lives"), [("ending", 2), ("ended", 1)])
def test_row_12_a_head_that_is_killed_at_the_end_leaves_a_job_that_ends(tmp_path: Path, point: str, lives: int) -> None:
    """Once its end is on disk the job is over, also for actors without a Stop; before that no Stop is sent."""
    ring = Ring(tmp_path, "run.total_train_steps=4", "launch.timeout_s=40")
    ring.set_failpoint(point, who="head-0")
    with ring.started():
        ring.wait_for_failpoint(point)
        ring.finish(timeout_s=60)
    assert len(runs.Run(ring.run).journals("head")) == lives
    assert json.loads((ring.run / "summary.json").read_text())["code"] == 0
    ring.check_survived(ended=lives > 1)  # its journal ends without a last line
