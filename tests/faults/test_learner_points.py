"""Rows 9 and 10: the learner is killed at each point between taking a batch and the end of its checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from areal_bus.storage import versioned_dirs
from tests.faults.ring import Fault, History, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

STEPS = 90
EVERY = 2

UPDATE = ("consumed", "update", "snapshot", "updated", "announced")  # from a batch to the word of its update
PUSH = ("push-announced", "push-met", "push-reported")  # from there to its publication
CHECKPOINT = ("checkpoint-begun", "checkpoint-files", "checkpoint-sync")  # before the new one has its name
SEALED = ("checkpoint-renamed", "checkpoint-prune", "checkpoint-discard")  # it has


@dataclass(frozen=True)
class Crash:
    """One failpoint: the learner's state at the kill, and where it restarted."""

    fault: Fault
    sealed: int  # newest version whose checkpoint it had said to be whole
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
        for point in (*UPDATE, *PUSH, *CHECKPOINT, *SEALED):
            crashes[point] = crash(ring, point, list(crashes.values())[-1:])
        ring.hold_learner(None)
        ring.finish()
        yield CrashedRing(ring, crashes, ring.check_survived())


def crash(ring: Ring, point: str, before: list[Crash]) -> Crash:
    """Let this incarnation make two updates and a checkpoint, then crash it."""
    since: Line = before[0].term if before else {"t": 0.0, "version": 0}
    odd = int(since["version"]) + 3
    ring.hold_learner(odd)
    ring.wait_for("update", version=odd, after=since["t"])
    sealed = ring.wait_for("checkpoint", role="learner", step=odd - 1, after=since["t"])
    ring.set_failpoint(point, who="learner-0")
    ring.hold_learner(odd + 2 * EVERY)
    fault = ring.wait_for_failpoint(point, after=since["t"])
    term = ring.wait_for("term", after=fault.t)
    done = [line["step"] for line in ring.lines("checkpoint", role="learner", after=since["t"]) if line["t"] < fault.t]
    updates = [line["version"] for line in ring.lines("update", after=since["t"]) if line["t"] < term["t"]]
    return Crash(fault, max([sealed["step"], *done]), updates[-1], term)


def trained_again(crashed: CrashedRing, one: Crash) -> None:
    """The new term takes its first batch at its start version, which the old term had taken before."""
    first = crashed.ring.lines("batch", after=one.term["t"])[0]
    assert first["step"] == one.term["version"]
    assert crashed.ring.lines("update", after=one.term["t"])[0]["version"] == one.term["version"] + 1


@pytest.mark.parametrize("point", [*UPDATE, *PUSH])
def test_row_09_kill_learner_between_consume_and_publish(crashed: CrashedRing, point: str) -> None:
    """The batch is trained once in the history that survives, from the checkpoint before it."""
    one = crashed.crashes[point]
    assert one.fault.name.startswith("learner-0.")
    assert one.term["version"] == one.sealed
    assert one.reached >= one.sealed
    trained_again(crashed, one)


@pytest.mark.parametrize("point", CHECKPOINT)
def test_row_10_kill_learner_while_it_writes_a_checkpoint(crashed: CrashedRing, point: str) -> None:
    """The previous checkpoint is used: one without its final name is ignored."""
    one = crashed.crashes[point]
    assert one.sealed + EVERY - one.reached in (0, 1)  # it was about to write that one
    assert one.term["version"] == one.sealed
    trained_again(crashed, one)


@pytest.mark.parametrize("point", SEALED)
def test_row_10_kill_learner_when_a_checkpoint_has_its_name(crashed: CrashedRing, point: str) -> None:
    """It is complete, even if nobody was informed."""
    one = crashed.crashes[point]
    assert one.term["version"] - one.reached in (0, 1)
    assert one.term["version"] % EVERY == 0
    trained_again(crashed, one)


def test_after_all_those_deaths_every_prompt_is_trained_once_and_all_checkpoints_are_whole(
    crashed: CrashedRing,
) -> None:
    ring, history = crashed.ring, crashed.history
    assert history.n_terms == 1 + len(crashed.crashes)
    assert set(history.rows().values()) == {1}
    shelves = versioned_dirs.versions(ring.run / "checkpoints")
    assert max(shelves) == STEPS
    for path in shelves.values():
        versioned_dirs.verify(path)
    assert {path.name for path in (ring.run / "checkpoints").iterdir()} == {path.name for path in shelves.values()}
    assert len(list(runs.Run(ring.run).journals("learner"))) == 1 + len(crashed.crashes)
