"""Rows 10 and 11: a torn or wrong checkpoint is reported and the one before it is used, after one killed run."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.faults.ring import Ring

pytestmark = pytest.mark.soak

STEPS = 8
NEWEST, OLDER = 6, 4


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ring]:
    """A run that was killed as a whole, with checkpoints of versions 2, 4 and 6."""
    ring = Ring(tmp_path_factory.mktemp("killed"), f"run.total_train_steps={STEPS}")
    ring.hold_learner(NEWEST + 1)
    with ring.started():
        ring.wait_for("checkpoint", role="learner", step=NEWEST)
        ring.wait_for("publish", version=NEWEST + 1)
        ring.kill_all()
        yield ring


def copy_of(killed: Ring, folder: Path) -> Ring:
    shutil.copytree(killed.folder / "runs", folder / "runs", symlinks=True)
    return Ring(folder, *killed.changes)


def model(run: Path, version: int) -> Path:
    return run / "checkpoints" / f"step-{version:06d}" / "model" / "model.safetensors"


def optimizer(run: Path, version: int) -> Path:
    return run / "checkpoints" / f"step-{version:06d}" / "shards" / "shard-00001-of-00001.safetensors"


def frontier(run: Path, version: int) -> Path:
    return run / "frontiers" / f"frontier-{version:06d}"


def flip(path: Path) -> None:
    """Flip one bit in the middle."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def tear(path: Path) -> None:
    """Cut off the second half."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of the weights": lambda run: flip(model(run, NEWEST)),
    "a bit of the optimizer": lambda run: flip(optimizer(run, NEWEST)),
    "torn optimizer": lambda run: tear(optimizer(run, NEWEST)),
    "no optimizer": lambda run: optimizer(run, NEWEST).unlink(),
    "no manifest": lambda run: (optimizer(run, NEWEST).parents[1] / "manifest.json").unlink(),
    "a bit of the frontier": lambda run: flip(frontier(run, NEWEST)),
    "torn frontier": lambda run: tear(frontier(run, NEWEST)),
    "no frontier": lambda run: frontier(run, NEWEST).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_row_11_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    killed: Ring, tmp_path: Path, damage: str
) -> None:
    ring = copy_of(killed, tmp_path)
    DAMAGE[damage](ring.run)
    with ring.started("--resume", str(ring.run)):
        ring.finish()
    ring.check_survived()
    term = ring.lines("term", role="head")[-1]
    assert (term["term"], term["version"]) == (1, OLDER)
    (note,) = [x["text"] for x in ring.lines("note", role="learner", inc=1) if "cannot be gone back to" in x["text"]]
    assert note.startswith(f"version {NEWEST} cannot be gone back to, an older one is used: ")
    assert note in ring.output  # loudly
    assert not [path for path in (ring.run / "checkpoints").iterdir() if path.name.startswith(".")]


def test_row_11_when_none_is_whole_the_job_ends_with_a_sentence_and_trains_nothing(
    killed: Ring, tmp_path: Path
) -> None:
    """The job must not restart at version 0, which would lose six steps silently."""
    ring = copy_of(killed, tmp_path)
    for version in (2, OLDER, NEWEST):
        flip(optimizer(ring.run, version))
    before = len(ring.lines("update"))
    with ring.started("--resume", str(ring.run)):
        ring.finish(code=1)
    assert len(ring.lines("update")) == before
    assert "a run goes on from a checkpoint whose files are whole" in ring.output


def test_row_10_a_half_written_checkpoint_of_a_dead_writer_is_ignored(killed: Ring, tmp_path: Path) -> None:
    """A checkpoint under a temporary name is not used, even when it is complete."""
    ring = copy_of(killed, tmp_path)
    shelf = ring.run / "checkpoints"
    shutil.copytree(shelf / f"step-{NEWEST:06d}", shelf / ".step-000008.1234567.tmp")
    (ring.run / "frontiers" / ".frontier-000008.1234567.tmp").write_bytes(b"torn")
    with ring.started("--resume", str(ring.run)):
        ring.finish()
    ring.check_survived()
    assert ring.lines("term", role="head")[-1]["version"] == NEWEST
    assert not (shelf / ".step-000008.1234567.tmp").exists()
