"""A learner goes on from its checkpoint as if it had never been away, and never from one that is not whole."""

import json
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.checkpoint import checkpoint
from actors.learner.checkpoint.checkpoint import PendingCheckpoint
from actors.learner.checkpoint.checkpoint_manager import CheckpointHooks, CheckpointManager, StartPoint, choose
from actors.learner.update.ppo import PPOActor
from areal_bus.config.sections import Config
from areal_bus.core.parts.collapse import Rollback
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint
from areal_bus.errors import CheckpointError
from areal_bus.storage import head_checkpoints, versioned_dirs
from areal_bus.storage.run_files import TERM_FILE, write_rollback
from tests.support.learner_setup import scratch_tokenizer, settings, tiny_actor, tiny_model, train, weights


@dataclass
class Shelf:
    """A run's folder with checkpoints that hold no model, and what was said of them."""

    run: Path
    said: list[str] = field(default_factory=list)

    def seal(self, *versions: int, frontier: bool = True) -> None:
        for version in versions:
            final = versioned_dirs.place(self.run / "checkpoints", version)
            building = versioned_dirs.building(final)
            (building / "state.json").write_text(json.dumps({"schema": checkpoint.SCHEMA, "version": version}))
            versioned_dirs.seal(building, final)
            if frontier:
                head_checkpoints.save(self.frontier(version), HeadCheckpoint(version))

    def frontier(self, version: int) -> Path:
        return head_checkpoints.path_of(self.run / "frontiers", version)

    def folder(self, version: int) -> Path:
        return versioned_dirs.place(self.run / "checkpoints", version)

    def choose(self, every_steps: int = 10) -> StartPoint:
        return choose(self.run, every_steps=every_steps, warn=self.said.append)


@pytest.fixture
def disk(tmp_path: Path) -> Shelf:
    return Shelf(tmp_path)


def tear(path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


def test_the_newest_version_is_chosen_by_number_and_version_0_without_any(disk: Shelf) -> None:
    assert disk.choose() == StartPoint(0, "")
    disk.seal(999_990, 1_000_000, 20)
    assert disk.choose() == StartPoint(1_000_000, str(disk.folder(1_000_000)))
    assert not disk.said


@pytest.mark.parametrize("broken", ["state.json", "manifest.json", "frontier", "no frontier", "another's frontier"])
def test_a_version_that_is_not_whole_is_named_and_the_one_before_is_used(disk: Shelf, broken: str) -> None:
    disk.seal(10, 20)
    if broken == "no frontier":
        disk.frontier(20).unlink()
    elif broken == "another's frontier":
        shutil.copy(disk.frontier(10), disk.frontier(20))
    else:
        tear(disk.frontier(20) if broken == "frontier" else disk.folder(20) / broken)
    assert disk.choose() == StartPoint(10, str(disk.folder(10)))
    (said,) = disk.said
    assert said.startswith("version 20 cannot be gone back to, an older one is used: ")


def test_a_checkpoint_under_another_versions_name_is_not_used(disk: Shelf) -> None:
    disk.seal(10)
    disk.folder(10).rename(disk.folder(20))
    disk.frontier(10).rename(disk.frontier(20))
    with pytest.raises(CheckpointError, match="name of its version"):
        disk.choose()


def test_a_run_whose_checkpoints_are_all_broken_ends_and_names_each(disk: Shelf) -> None:
    disk.seal(10, 20)
    tear(disk.folder(10) / "state.json")
    tear(disk.frontier(20))
    with pytest.raises(CheckpointError, match=r"none in .*checkpoints is .*frontier-000020.*step-000010/state.json"):
        disk.choose()
    assert len(disk.said) == 2


def test_a_first_checkpoint_that_the_head_did_not_finish_counts_as_none(disk: Shelf) -> None:
    head_checkpoints.save(disk.frontier(0), HeadCheckpoint(0))  # of an evaluation before training
    disk.seal(10, frontier=False)
    assert disk.choose() == StartPoint(0, "")
    assert len(disk.said) == 1
    assert disk.choose(every_steps=0) == StartPoint(0, "")
    with pytest.raises(CheckpointError):  # here it is not the first: older ones must have been there
        disk.choose(every_steps=5)
    disk.seal(23, frontier=False)
    with pytest.raises(CheckpointError):  # the first of two must have had one
        disk.choose(every_steps=0)


def test_a_learner_obeys_a_rollback_until_a_term_has_begun(disk: Shelf) -> None:
    disk.seal(10, 20, 30)
    (disk.run / TERM_FILE).write_text('{"term": 2}', encoding="utf-8")
    write_rollback(disk.run, Rollback(term=2, at=34, to=20, max_lr=1e-5, why="ess"))
    assert disk.choose() == StartPoint(20, str(disk.folder(20)))
    tear(disk.folder(20) / "state.json")
    assert disk.choose() == StartPoint(10, str(disk.folder(10)))
    (disk.run / TERM_FILE).write_text('{"term": 3}', encoding="utf-8")
    assert disk.choose() == StartPoint(30, str(disk.folder(30)))


def test_a_copy_in_memory_does_not_count_until_a_rollback_is_obeyed(tmp_path: Path) -> None:
    disk, actor = Shelf(tmp_path), tiny_actor(tmp_path)
    disk.seal(10, 20)
    keeper = keeper_of(tmp_path, actor, settings(checkpoint={"every_steps": 10}))
    assert keeper.choose(held=[24, 25]) == StartPoint(25, "", is_held=True, newest=str(disk.folder(20)))
    (tmp_path / TERM_FILE).write_text('{"term": 2}', encoding="utf-8")
    write_rollback(tmp_path, Rollback(term=2, at=26, to=10, max_lr=1e-5, why="ess"))
    assert keeper.choose(held=[24, 25]) == StartPoint(10, str(disk.folder(10)))
    assert not disk.folder(20).exists()  # the undone updates are no start point any more


def test_version_0_needs_no_head_checkpoint_and_no_checkpoint(disk: Shelf) -> None:
    disk.seal(0, frontier=False)
    assert disk.choose() == StartPoint(0, str(disk.folder(0)))
    tear(disk.folder(0) / "state.json")
    assert disk.choose() == StartPoint(0, "")


def test_a_checkpoint_that_stood_aside_when_its_writer_died_is_found(disk: Shelf) -> None:
    disk.seal(10)
    disk.folder(10).rename(disk.run / "checkpoints" / ".step-000010.old")
    assert disk.choose().version == 10


def keeper_of(run: Path, actor: PPOActor, config: Config, **hooks: Any) -> CheckpointManager:
    made = CheckpointHooks(hooks.pop("sealed", lambda version, folder: None), **hooks)
    return CheckpointManager(run, config.checkpoint, journal=actor._journal, is_root=True, hooks=made)


def test_a_folder_in_the_place_of_the_models_link_leaves_the_model_in_its_checkpoint(tmp_path: Path) -> None:
    """A copy of a run that followed its links has one; the learner failed at its end, six times."""
    keeper = keeper_of(tmp_path, tiny_actor(tmp_path, settings()), settings())
    keeper.folder = str(tmp_path / "checkpoints" / "step-000004")
    (tmp_path / "model").mkdir()
    assert keeper.export() == f"{keeper.folder}/model"
    (tmp_path / "model").rmdir()
    assert keeper.export() == str(tmp_path / "model")
    assert (tmp_path / "model").readlink() == Path("checkpoints/step-000004/model")
    assert not list(tmp_path.glob(".model*"))


@pytest.mark.parametrize(
    ("took_s", "staged_s", "interval_s"),
    [
        (0.01, 0.01, 5.0),  # the head writes its part as often
        (0.5, 0.1, 25.0),  # 2 % of the time
        (6.0, 1.0, 300.0),
        (60.0, 2.0, 600.0),  # every ten minutes at least
        (200.0, 60.0, 1200.0),  # unless training waited for over a twentieth of the time
    ],
)
def test_checkpoints_by_time_follow_their_measured_cost(
    tmp_path: Path, took_s: float, staged_s: float, interval_s: float
) -> None:
    clock = [1000.0]
    config = settings()
    actor, words = tiny_actor(tmp_path, config), scratch_tokenizer(tmp_path / "scratch")
    keeper = keeper_of(tmp_path, actor, config, now=lambda: clock[0])

    def is_due_after(seconds: float) -> bool:
        clock[0] += seconds
        return keeper.is_due(actor)

    assert config.checkpoint.every_s == 600.0
    assert not is_due_after(5000.0)  # version 0 is the model itself
    keeper._tried = clock[0]
    train(actor, range(1))
    assert not is_due_after(59.0)
    assert is_due_after(1.0)  # before the cost is known
    keeper.keep(actor, words)
    keeper.settle()
    keeper._took_s, keeper._waited_s = took_s, staged_s
    assert not is_due_after(interval_s - 1.0)
    assert is_due_after(1.0)


def test_checkpoints_by_time_measure_their_cost_and_zero_turns_them_off(tmp_path: Path) -> None:
    clock = [1000.0]
    config = settings(checkpoint={"async_save": False})
    actor, words = tiny_actor(tmp_path, config), scratch_tokenizer(tmp_path / "scratch")
    train(actor, range(1))
    keeper = keeper_of(tmp_path, actor, config, now=lambda: clock.append(clock.pop() + 1.0) or clock[0])
    keeper.keep(actor, words)
    assert keeper._took_s == keeper._waited_s >= 1.0
    off = keeper_of(tmp_path, actor, settings(checkpoint={"every_s": 0.0}), now=lambda: 1e9)
    assert not off.is_due(actor)
    assert off.describe() == "checkpoints: none before the end"
    both = keeper_of(tmp_path, actor, settings(checkpoint={"every_steps": 20}))
    assert both.describe() == (
        "checkpoints: every 20 steps and after 60 s, then as often as takes under 2% of the time, at least every 600 s"
    )


@pytest.mark.parametrize("has_checkpoint", [False, True])
def test_the_schedule_of_checkpoints_continues_in_the_next_incarnation_of_a_learner(
    tmp_path: Path, has_checkpoint: bool
) -> None:
    """Learners that die within a minute of their starts write a checkpoint all the same."""
    config, clock = settings(), [1000.0]
    actor = tiny_actor(tmp_path, config)
    train(actor, range(1))
    newest = tmp_path / "config.json"
    newest.write_text("{}")
    if has_checkpoint:
        os.utime(newest, (0, 0))
        Shelf(tmp_path).seal(1)
        newest = Shelf(tmp_path).folder(1)
    for age_s, is_due in ((40.0, False), (70.0, True), (-1000.0, False)):  # the wall clock may be set back
        os.utime(newest, (time.time() - age_s,) * 2)
        assert keeper_of(tmp_path, actor, config, now=lambda: clock[0]).is_due(actor) is is_due


def notes(actor: PPOActor) -> list[str]:
    lines = map(json.loads, actor._journal.path.read_text().splitlines())
    return [line["text"] for line in lines if line["event"] == "note"]


def test_checkpoints_of_a_discarded_timeline_are_removed_before_a_term_begins(tmp_path: Path) -> None:
    disk = Shelf(tmp_path)
    disk.seal(10, 20, 30)
    tear(disk.folder(20) / "state.json")
    disk.frontier(30).unlink()
    actor = tiny_actor(tmp_path)
    keeper = keeper_of(tmp_path, actor, settings(checkpoint={"every_steps": 10}))
    assert keeper.choose() == StartPoint(10, str(disk.folder(10)))
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000010"]
    assert len(notes(actor)) == 4


@contextmanager
def full_disk() -> Iterator[None]:
    """No file can grow over 16 KiB: the operating system itself refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16 << 10, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_training_goes_on_without_a_checkpoint_that_the_disk_does_not_take(tmp_path: Path) -> None:
    config = settings(checkpoint={"every_steps": 1, "keep": 1})
    actor = tiny_actor(tmp_path, config)
    keeper = keeper_of(tmp_path, actor, config)
    words = scratch_tokenizer(tmp_path / "scratch")
    keeper.keep(actor, words)
    keeper.settle()
    before = keeper.folder
    train(actor, range(1))
    with full_disk():
        keeper.keep(actor, words)
        keeper.settle()
    assert keeper.folder == before
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000000"]
    checkpoint.verify(Path(before))
    (note,) = notes(actor)
    assert note.startswith(
        "training goes on, and could come back from an older checkpoint only: cannot write the checkpoint"
    )
    with full_disk(), pytest.raises(CheckpointError, match=r"cannot write the checkpoint .*step-000001 \("):
        keeper.finish(actor, words)
    keeper.finish(actor, words)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    checkpoint.verify(Path(keeper.folder))


def test_a_checkpoint_holds_the_state_at_its_version_while_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two updates pass before the disk takes it. The next one waits for it."""
    may_write = threading.Event()
    real = PendingCheckpoint.write

    def write(self: PendingCheckpoint) -> Path:
        may_write.wait(60.0)
        return real(self)

    monkeypatch.setattr(PendingCheckpoint, "write", write)
    config = settings(model={"scratch": {}, "dtype": "bfloat16"}, actor={"lr": 1e-2, "advantage": "gae"})
    actor, words = tiny_actor(tmp_path, config), scratch_tokenizer(tmp_path / "scratch")
    sealed: list[int] = []
    clock = [0.0]
    keeper = keeper_of(
        tmp_path,
        actor,
        config,
        sealed=lambda version, _: sealed.append(version),
        tick=may_write.set,  # training waits: only then
        now=lambda: clock[0],
    )
    train(actor, range(1))
    held = weights(actor.policy)
    keeper.keep(actor, words)
    clock[0] = 1e6
    train(actor, range(1, 3))
    keeper.record()
    assert not keeper.is_due(actor)
    assert (sealed, keeper.folder, keeper.sealed()) == ([], "", [])
    keeper.keep(actor, words)
    assert (sealed, keeper.folder[-6:]) == ([1], "000001")
    again = tiny_actor(tmp_path / "again", config, model=tiny_model(5))
    keeper.restore(again, StartPoint(1, keeper.folder))
    torch.testing.assert_close(weights(again.policy), held, atol=0, rtol=0)
    keeper.settle()
    assert sealed == [1, 3]
    train(again, range(1, 3))
    for ours, theirs in ((actor.policy, again.policy), (actor.critic.model, again.critic.model)):
        torch.testing.assert_close(weights(ours), weights(theirs), atol=0, rtol=0)
