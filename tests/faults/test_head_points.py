"""Row 12 at its worst moments: the head is killed between deciding, writing and sending."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Blow, History, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

STEPS = 60
EVERY = 2
POINTS = ("head-updated", "frontier", "frontier-saved", "term")


@dataclass(frozen=True)
class Strike:
    blow: Blow
    reached: int  # newest update of that head's life
    term: Line  # the first one of the next life


@dataclass(frozen=True)
class Struck:
    ring: Ring
    strikes: dict[str, Strike]
    history: History


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    ring = Ring(tmp_path_factory.mktemp("heads"), f"run.total_train_steps={STEPS}")
    ring.hold(3)
    strikes: dict[str, Strike] = {}
    with ring.started():
        for point in POINTS:
            strikes[point] = strike(ring, point, life=len(strikes))
        ring.hold(None)
        ring.finish()
        yield Struck(ring, strikes, ring.check_survived())


def strike(ring: Ring, point: str, *, life: int) -> Strike:
    """Once it has come to an update between two checkpoints: the next thing of this kind that it does."""
    begun = ring.until("term", inc=life)
    odd = int(begun["version"]) + 3 - int(begun["version"]) % EVERY
    ring.hold(odd)
    ring.until("update", inc=life, version=odd)
    ring.until("checkpoint", role="learner", step=odd - 1, after=begun["t"])
    ring.arm(point, who="head-0")
    if point == "term":
        ring.kill("learner-0")  # whose next life begins one
    else:
        ring.hold(odd + EVERY)
    blow = ring.struck(point, after=begun["t"])
    term = ring.until("term", inc=life + 1)
    return Strike(blow, int(ring.lines("update", role="head", inc=life)[-1]["version"]), term)


@pytest.mark.parametrize("point", POINTS)
def test_row_12_kill_head_between_deciding_writing_and_telling(struck: Struck, point: str) -> None:
    """The next head goes on where the learner is, in a term that nobody has begun before.

    Or from the checkpoint where the learner has begun a term that its head could not write down.
    """
    ring, one = struck.ring, struck.strikes[point]
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


def test_after_all_those_deaths_every_prompt_is_trained_once(struck: Struck) -> None:
    ring = struck.ring
    assert [path.stem for path in runs.Run(ring.run).journals("head")] == [
        f"head-0.{n}" for n in range(len(POINTS) + 1)
    ]
    assert set(struck.history.rows().values()) == {1}
    last = ring.lines("term", role="head")[-1]["term"]
    assert last > len(POINTS)  # the one that was on disk and never told is left out
    assert json.loads((ring.run / "term.json").read_text())["term"] == last


@pytest.mark.parametrize(("point", "lives"), [("ending", 2), ("ended", 1)])
def test_row_12_a_head_that_is_killed_at_the_end_leaves_a_job_that_ends(tmp_path: Path, point: str, lives: int) -> None:
    """Once its end is on disk the job is over, whoever has not heard of it; before that nobody was told to stop."""
    ring = Ring(tmp_path, "run.total_train_steps=4", "launch.timeout_s=40")
    ring.arm(point, who="head-0")
    with ring.started():
        ring.struck(point)
        ring.finish(timeout_s=60)
    assert len(runs.Run(ring.run).journals("head")) == lives
    assert json.loads((ring.run / "summary.json").read_text())["code"] == 0
    ring.check_survived(ended=lives > 1)  # its journal ends without a last line
