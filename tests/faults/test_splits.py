"""Row 43: the split of ranks changes while the job runs, and actors are killed during the change."""

from pathlib import Path

import pytest

from tests.faults.ring import Line, Ring

pytestmark = pytest.mark.slow

LONG_S = 300.0  # for starts on a loaded machine
N_RANKS = 5  # one learner, one reward, three generators


def changing(folder: Path, schedule: list[list[int]], *changes: str) -> Ring:
    """Ranks forked from one process, for a start takes long. Only a change or the end writes a checkpoint."""
    settings = ("launch.start=fork", "checkpoint.every_steps=100", f"topology.adapt.schedule={schedule}", *changes)
    return Ring(folder, *settings, ranks=N_RANKS, bootstrap="env")


def first_lines(ring: Ring) -> list[Line]:
    """The first line of each split but that of the settings: by the head that changed it, or by the one that followed
    a head that was killed before it could write the line.
    """
    found: dict[int, Line] = {}
    for line in ring.lines("split", role="head"):
        found.setdefault(line["split"], line)
    return [line for number, line in sorted(found.items()) if number]


def splits(ring: Ring) -> list[tuple[int, int, int]]:
    """(version, learners, generators) of every split but that of the settings."""
    return [(x["version"], x["learners"], x["generators"]) for x in first_lines(ring)]


def check_weights(ring: Ring) -> None:
    """The learners of a new split push the very weights that those before them made."""
    made = {line["version"]: line["digest"] for line in ring.lines("update", role="head")}
    for line in first_lines(ring):
        term = ring.lines("term", role="head", after=line["t"])[0]
        roots = ring.lines("pushed", role="learner", after=term["t"], version=line["version"])
        ring.check(bool(roots), f"the weights of version {line['version']} are pushed after the change")
        ring.check({x["digest"] for x in roots} == {made[line["version"]]}, f"they are those that were made: {roots}")


def test_row_43_a_split_survives_kills_at_every_step_of_its_change(tmp_path: Path) -> None:
    """A learner while it writes the checkpoint, the head before and after the split is on disk, a generator that is
    told to learn, a learner that was a generator while it loads: each ends in exactly one of both splits.
    """
    schedule = [[step, 2 - k % 2] for k, step in enumerate((2, 4, 6, 8, 10))]
    ring = changing(tmp_path, schedule, "run.total_train_steps=12", "launch.max_restarts=2")
    kills = [
        ("checkpoint-renamed", "learner-0"),
        ("divided", "head-0"),
        ("message-Reassign", "generator-2"),
        ("dividing", "head-0"),
        ("loading", "learner-1"),
    ]
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for("update", version=2)
        for k, (point, who) in enumerate(kills):
            ring.set_failpoint(point, who=who)
            since = ring.lines("update", role="head")[-1]["t"]
            ring.hold_learner(schedule[k][0] + 2)
            ring.wait_for_failpoint(point, after=since)
            ring.wait_for("split", split=k + 1, after=since)
            ring.wait_for("update", version=schedule[k][0] + 2, after=since)
        ring.hold_learner(None)
        ring.finish(timeout_s=LONG_S)
    ring.check_survived()
    assert [x[1] for x in splits(ring)] == [2, 1, 2, 1, 2]
    check_weights(ring)
