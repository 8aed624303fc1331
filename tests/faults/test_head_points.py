"""Row 12 at its worst moments: the head is killed between deciding, writing and sending."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Fault, History, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

STEPS = 60
EVERY = 2
POINTS = ("head-updated", "frontier", "frontier-saved", "term")


@dataclass(frozen=True)
class Crash:
    fault: Fault
    reached: int  # newest update of that head's life
    term: Line  # the first one of the next life


@dataclass(frozen=True)
class CrashedRing:
    ring: Ring
    crashes: dict[str, Crash]
    history: History


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashedRing]:
    ring = Ring(tmp_path_factory.mktemp("heads"), f"run.total_train_steps={STEPS}")
    ring.hold_learner(3)
    crashes: dict[str, Crash] = {}
    with ring.started():
        for point in POINTS:
            crashes[point] = crash(ring, point, incarnation=len(crashes))
        ring.hold_learner(None)
        ring.finish()
        yield CrashedRing(ring, crashes, ring.check_survived())


def crash(ring: Ring, point: str, *, incarnation: int) -> Crash:
    """Once it has come to an update between two checkpoints: the next thing of this kind that it does."""
    begun = ring.wait_for("term", inc=incarnation)
    odd = int(begun["version"]) + 3 - int(begun["version"]) % EVERY
    ring.hold_learner(odd)
    ring.wait_for("update", inc=incarnation, version=odd)
    ring.wait_for("checkpoint", role="learner", step=odd - 1, after=begun["t"])
    ring.set_failpoint(point, who="head-0")
    if point == "term":
        ring.kill("learner-0")  # whose next life begins one
    else:
        ring.hold_learner(odd + EVERY)
    fault = ring.wait_for_failpoint(point, after=begun["t"])
    term = ring.wait_for("term", inc=incarnation + 1)
    return Crash(fault, int(ring.lines("update", role="head", inc=incarnation)[-1]["version"]), term)


@pytest.mark.parametrize("point", POINTS)
def test_row_12_kill_head_between_deciding_writing_and_telling(crashed: CrashedRing, point: str) -> None:
    """The next head goes on where the learner is, in a term that nobody has begun before.

    Or from the checkpoint where the learner has begun a term that its head could not write down.
    """
    ring, one = crashed.ring, crashed.crashes[point]
    version = one.term["version"]
    if point == "term":
        assert not one.term["lives_on"]
        assert version % EVERY == 0
        assert one.reached - EVERY <= version <= one.reached
    else:
        assert one.term["lives_on"]
        assert one.reached <= version <= one.reached + 1
    terms = [line["term"] for line in ring.lines("term", role="head")]
    assert terms == sorted(set(terms))
    assert ring.lines("update", role="head", after=one.term["t"])[0]["version"] == version + 1


def test_after_all_those_deaths_every_prompt_is_trained_once(crashed: CrashedRing) -> None:
    ring = crashed.ring
    assert [path.stem for path in runs.Run(ring.run).journals("head")] == [
        f"head-0.{n}" for n in range(len(POINTS) + 1)
    ]
    assert set(crashed.history.rows().values()) == {1}
    last = ring.lines("term", role="head")[-1]["term"]
    assert last > len(POINTS)  # a term that was written and never announced is skipped
    assert json.loads((ring.run / "term.json").read_text())["term"] == last


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
