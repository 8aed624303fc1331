"""Row 43: the split of ranks changes while the job runs, and actors are killed during the change."""

import json
from pathlib import Path

import pytest

from tests.faults.ring import ROOT, Line, Ring
from tools import run as runs

pytestmark = pytest.mark.slow

LONG_S = 300.0  # for starts on a loaded machine
N_RANKS = 5  # one learner, one reward, three generators
STEP_S = 0.05  # that a decode step takes longer, as on a device of its own: two cores have no room for three generators


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


@pytest.mark.soak  # the next one checks the weights of its changes, too
def test_row_43_a_job_changes_its_split_twice_and_trains_each_prompt_once(tmp_path: Path) -> None:
    """At eta = 0 no sample is under way at the change, and the weights before and after it are equal, bit for bit."""
    ring = changing(
        tmp_path,
        [[2, 2], [4, 1]],
        "run.total_train_steps=6",
        "rollout.max_head_offpolicyness=0",
        "bus.transport='tcp'",
        "bus.curve='on'",
        "launch.max_restarts=0",
    )
    with ring.started():
        ring.finish(timeout_s=LONG_S)
    history = ring.check_survived()
    assert splits(ring) == [(2, 2, 2), (4, 1, 3)]
    assert history.n_terms == 3
    assert not [line for line in ring.lines("refund", role="head") if line["reason"] == "lost_timeline"]
    check_weights(ring)
    assert {line["name"] for line in ring.lines("joined", role="head")} >= {"learner-1.1", "generator-2.2"}
    assert json.loads((ring.run / "split.json").read_text())["number"] == 2


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


@pytest.mark.soak  # without a ring: tests/launch/test_splits.py
def test_a_resumed_run_goes_on_with_its_split(tmp_path: Path) -> None:
    """It was killed while two ranks learned; the settings begin with one. Only the change had written a checkpoint."""
    ring = changing(tmp_path, [[2, 2]], "run.total_train_steps=6")
    ring.hold_learner(4)
    with ring.started():
        ring.wait_for("update", version=4)
        ring.kill_all()
        ring.hold_learner(None)
        ring.start("--resume", str(ring.run)).finish(timeout_s=LONG_S)
    ring.check_survived()
    assert "goes on with the split of version 2: 2 learners, 2 generators" in ring.output
    starts = ring.lines("split", role="head", why="start")
    assert [(x["learners"], x["split"]) for x in starts] == [(1, 0), (2, 1)]
    assert len(runs.Run(ring.run).journals("learner")) >= 4


def planned(folder: Path, *changes: str) -> Ring:
    """The model of configs/tiny.toml, with long completions and few slots. It begins with three learners and a single
    generator, which is too few: an update takes a twentieth of the time in which its batch is sampled.
    """
    ring = Ring(
        folder,
        "launch.start=fork",
        "run.total_train_steps=20",
        "topology.learners=3",
        "topology.adapt.every_steps=4",
        "learner.warmup.steps=0",  # an untrained model does not end its completions
        "actor.lr=1e-5",
        "gconfig.n_samples=4",
        "gconfig.max_new_tokens=46",
        "data.batch_size=8",
        "rollout.max_concurrent_rollouts=4",
        "checkpoint.every_steps=100",
        *changes,
        ranks=N_RANKS,
        config=ROOT / "configs" / "tiny.toml",
        bootstrap="env",
    )
    ring.throttle(STEP_S)
    return ring


def check_more_generators(ring: Ring) -> None:
    """How many it chooses depends on what it measures on shared cores; test_split_planner has the exact numbers."""
    found = splits(ring)
    ring.check(bool(found) and found[-1][2] > 1, f"the split has more generators than one: {found}")


@pytest.mark.soak
def test_the_planners_change_survives_kills_of_learner_generator_and_head(tmp_path: Path) -> None:
    """In one change: a learner while it writes the checkpoint, then the only generator, the head before the split is on
    disk (the next one measures and decides anew), that head after it, and a new generator at its first weights.
    """
    ring = planned(tmp_path, "bus.silent_s=1.5", "launch.max_restarts=2")
    for point, who in (
        ("checkpoint-renamed", "learner-0"),
        ("dividing", "head-0"),
        ("divided", "head-0"),
        ("receive-announced", "generator-1"),
    ):
        ring.set_failpoint(point, who=who)
    with ring.started():
        ring.wait_for_failpoint("checkpoint-renamed")
        ring.kill("generator-0")
        ring.finish(timeout_s=LONG_S)
    ring.check_survived()
    hits = [(fault.name.rpartition(".")[0], fault.name) for fault in ring.failpoint_hits()]
    ring.check(len(hits) == 4, f"all hit their failpoint: {hits}")
    check_more_generators(ring)
    decisions = [line for line in ring.lines("adapt", role="head") if "wanted_learners" in line]
    ring.check(len(decisions) >= 2, f"the head after the first one decides, too: {decisions}")
    check_weights(ring)
