"""Rows 9 and 10: the learner is killed at each point between taking a batch and the end of its checkpoint."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from areal_bus.storage import versioned_dirs
from tests.faults.ring import Blow, History, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

STEPS = 90
EVERY = 2

UPDATE = ("consumed", "update", "snapshot", "updated", "announced")  # from a batch to the word of its update
PUSH = ("push-announced", "push-met", "push-reported")  # from there to its publication
CHECKPOINT = ("checkpoint-begun", "checkpoint-files", "checkpoint-sync")  # before the new one has its name
SEALED = ("checkpoint-renamed", "checkpoint-prune", "checkpoint-discard")  # it has


@dataclass(frozen=True)
class Strike:
    """One injection point: the learner's state at the kill, and where it restarted."""

    blow: Blow
    sealed: int  # newest version whose checkpoint it had said to be whole
    reached: int  # newest update that the head knew
    term: Line  # the next one


@dataclass(frozen=True)
class Struck:
    ring: Ring
    strikes: dict[str, Strike]
    history: History


@pytest.fixture(scope="module")
def struck(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Struck]:
    ring = Ring(
        tmp_path_factory.mktemp("points"),
        f"run.total_train_steps={STEPS}",
        "bus.silent_s=3",
        "checkpoint.async_save=false",  # else an update and a checkpoint may end in either order
    )
    ring.hold(3)
    strikes: dict[str, Strike] = {}
    with ring.started():
        for point in (*UPDATE, *PUSH, *CHECKPOINT, *SEALED):
            strikes[point] = strike(ring, point, list(strikes.values())[-1:])
        ring.hold(None)
        ring.finish()
        yield Struck(ring, strikes, ring.check_survived())


def strike(ring: Ring, point: str, before: list[Strike]) -> Strike:
    """Let this incarnation make two updates and a checkpoint, then strike it."""
    since: Line = before[0].term if before else {"t": 0.0, "version": 0}
    odd = int(since["version"]) + 3
    ring.hold(odd)
    ring.until("update", version=odd, after=since["t"])
    sealed = ring.until("checkpoint", role="learner", step=odd - 1, after=since["t"])
    ring.arm(point, who="learner-0")
    ring.hold(odd + 2 * EVERY)
    blow = ring.struck(point, after=since["t"])
    term = ring.until("term", after=blow.t)
    done = [line["step"] for line in ring.lines("checkpoint", role="learner", after=since["t"]) if line["t"] < blow.t]
    updates = [line["version"] for line in ring.lines("update", after=since["t"]) if line["t"] < term["t"]]
    return Strike(blow, max([sealed["step"], *done]), updates[-1], term)


def trained_again(struck: Struck, one: Strike) -> None:
    """The new term takes its first batch at its start version, which the old term had taken before."""
    first = struck.ring.lines("batch", after=one.term["t"])[0]
    assert first["step"] == one.term["version"]
    assert struck.ring.lines("update", after=one.term["t"])[0]["version"] == one.term["version"] + 1


@pytest.mark.parametrize("point", [*UPDATE, *PUSH])
def test_row_09_kill_learner_between_consume_and_publish(struck: Struck, point: str) -> None:
    """The batch is trained once in the history that survives, from the checkpoint before it."""
    one = struck.strikes[point]
    assert one.blow.name.startswith("learner-0.")
    assert one.term["version"] == one.sealed
    assert one.reached >= one.sealed
    trained_again(struck, one)


@pytest.mark.parametrize("point", CHECKPOINT)
def test_row_10_kill_learner_while_it_writes_a_checkpoint(struck: Struck, point: str) -> None:
    """The previous checkpoint is used: one without its final name is ignored."""
    one = struck.strikes[point]
    assert one.reached == one.sealed + EVERY  # it was about to write that one
    assert one.term["version"] == one.sealed
    trained_again(struck, one)


@pytest.mark.parametrize("point", SEALED)
def test_row_10_kill_learner_when_a_checkpoint_has_its_name(struck: Struck, point: str) -> None:
    """It is complete, even if nobody was informed."""
    one = struck.strikes[point]
    assert one.term["version"] == one.reached
    trained_again(struck, one)


def test_after_all_those_deaths_every_prompt_is_trained_once_and_all_checkpoints_are_whole(struck: Struck) -> None:
    ring, history = struck.ring, struck.history
    assert history.n_terms == 1 + len(struck.strikes)
    assert set(history.rows().values()) == {1}
    shelves = versioned_dirs.versions(ring.run / "checkpoints")
    assert max(shelves) == STEPS
    for path in shelves.values():
        versioned_dirs.verify(path)
    assert {path.name for path in (ring.run / "checkpoints").iterdir()} == {path.name for path in shelves.values()}
    assert len(list(runs.Run(ring.run).journals("learner"))) == 1 + len(struck.strikes)
