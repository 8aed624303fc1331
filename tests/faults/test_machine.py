"""Rows 36, 38 and 39 over real jobs: full disk, out of memory, preemption notices, lost ranks."""

import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.faults.ring import ROOT, Ring
from tests.launch.test_bootstrap import MPI, MPIRUN
from tools.audit.findings import InvariantVerdict

pytestmark = pytest.mark.soak


def leave_out(what: str, why: str) -> NoReturn:
    """A fault that cannot be made here fails its test, unless FAULT_WITHOUT=disk,memory says that it is known."""
    if what in os.environ.get("FAULT_WITHOUT", "").split(","):
        pytest.skip(why)
    pytest.fail(f"{why}; FAULT_WITHOUT={what} leaves it out")


# 36: the disk


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    """A file system of this size."""
    folder.mkdir(parents=True)
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if made.returncode:
        leave_out("disk", f"a small file system cannot be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def fill(disk: Path) -> Path:
    """Take all that is left."""
    ballast = disk / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT)
    with contextlib.suppress(OSError):
        while os.write(file, bytes(1 << 12)):
            pass
    os.close(file)
    return ballast


def test_row_36_a_full_disk_costs_lines_and_checkpoints_and_no_training_state(tmp_path: Path) -> None:
    """Full from version 5 to 9: lines of the journal are lost, and seen to be; checkpoints before and after it."""
    ring = Ring(tmp_path, "run.total_train_steps=14", "checkpoint.keep=20")
    ring.hold_learner(5)
    with small_disk(tmp_path / "runs", 64) as disk, ring.started():
        ring.wait_for("checkpoint", role="learner", step=4)
        ring.wait_for("publish", version=5)
        ballast = fill(disk)
        ring.hold_learner(9)
        ring.wait_until(lambda: reached(ring, 9), "nine updates on a full disk")
        assert checkpoints(ring) == ["step-000002", "step-000004"]
        ballast.unlink()
        ring.hold_learner(None)
        ring.finish()
        assert "No space left on device" in ring.output  # people hear of it
        assert checkpoints(ring)[-1] == "step-000014"
        summary = json.loads((ring.run / "summary.json").read_text())
        assert (summary["code"], summary["versions"]) == (0, 14)
        judged = ring.audited()
        assert judged["journal"].verdict is InvariantVerdict.BROKEN  # and says where lines are missing
        seqs = [line["seq"] for line in ring.lines(role="head")]
        assert len(seqs) < seqs[-1] + 1
        assert all(one < other for one, other in itertools.pairwise(seqs))


def checkpoints(ring: Ring) -> list[str]:
    return sorted(path.name for path in (ring.run / "checkpoints").glob("step-*"))


def reached(ring: Ring, version: int) -> bool:
    """By what the job prints: the journal may be cut short."""
    return re.search(rf"^ +{version} ", ring.output, re.MULTILINE) is not None


# 36: memory


@contextlib.contextmanager
def little_memory(pid: int) -> Iterator[None]:
    """From now on this process gets next to no more memory, and the kernel kills it."""
    v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
    parent, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = parent / f"areal-bus-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(1 << 16))
        (group / "cgroup.procs").write_text(str(pid))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        leave_out("memory", f"memory cannot be limited by a control group here: {error}")
    try:
        yield
    finally:
        for left in (group / "cgroup.procs").read_text().split():
            (parent / "cgroup.procs").write_text(left)
        group.rmdir()


@pytest.mark.parametrize("who", ["generator-0", "learner-0"])
def test_row_36_an_actor_that_the_kernel_kills_for_memory_comes_back_and_nothing_is_lost(
    tmp_path: Path, who: str
) -> None:
    ring = Ring(tmp_path, "run.total_train_steps=10")
    ring.hold_learner(3)
    with ring.started():
        ring.wait_for("publish", version=3)
        with little_memory(ring.actor(who)[0]):
            ring.hold_learner(6)
            ring.wait_for("joined", name=f"{who}.1")
        ring.hold_learner(None)
        ring.finish()
    assert f"({who}): killed by SIGKILL; started again as {who}.1" in ring.output
    ring.check_survived()


# 38


def drained(ring: Ring) -> None:
    """It ended as a job that is to go on."""
    ring.check_survived(ended=False)
    summary = json.loads((ring.run / "summary.json").read_text())
    assert (summary["code"], summary["drained"]) == (0, True)
    assert summary["checkpoint"].endswith(f"step-{summary['versions']:06d}")


def test_row_38_sigterm_without_mpirun_is_a_notice_a_checkpoint_is_written_and_the_end_is_0(tmp_path: Path) -> None:
    ring = Ring(tmp_path, "run.total_train_steps=500", "launch.drain_s=60", bootstrap="env")
    with ring.started():
        ring.wait_for("publish", version=3)
        began = time.monotonic()
        ring.send(signal.SIGTERM)
        ring.finish()
        assert time.monotonic() - began < 60
        drained(ring)
        ring.start("--resume", str(ring.run), changes=("run.total_train_steps=12",))
        ring.finish()
    ring.check_survived()


def test_row_38_the_line_of_the_docs_drains_one_job_and_no_other(tmp_path: Path) -> None:
    line = re.search(r"^kill -USR1 .*runs/demo/pid\)", (ROOT / "docs" / "resume.md").read_text(), re.MULTILINE)
    assert line is not None
    rings = [Ring(tmp_path / name, "run.total_train_steps=500") for name in ("one", "other")]
    with rings[0].started() as one, rings[1].started() as other:
        for ring in rings:
            ring.wait_for("publish", version=2)
        subprocess.run(["sh", "-c", line[0].replace("runs/demo", str(one.run))], check=True)
        one.finish()
        assert "SIGUSR1: drains" in one.output
        assert not (one.run / "pid").exists()
        reached = other.version
        other.wait_for("update", version=reached + 2)
        assert "drains" not in other.output
    drained(one)


# 39


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun beside this Python or on the path")
def test_row_39_mpirun_names_a_rank_that_dies_before_it_meets_the_others(tmp_path: Path) -> None:
    job = f"{sys.executable} -m areal_bus.launch {ROOT}/tests/faults/ring.toml --set run.folder={tmp_path}/runs"
    shell = f'if [ "$OMPI_COMM_WORLD_RANK" = 2 ]; then kill -9 $$; fi; exec {job}'
    words = [str(MPIRUN), "--oversubscribe", "-np", "4", "sh", "-c", shell]
    done = subprocess.run(
        words, cwd=ROOT, env=os.environ | MPI, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "rank 2" in done.stderr + done.stdout
    assert "signal 9" in done.stderr + done.stdout


def test_row_39_an_actor_that_dies_before_the_bus_is_up_is_named_and_ends_the_start(tmp_path: Path) -> None:
    """As often as launch.max_restarts allows; then the job ends with the rank, the actor and how it died."""
    ring = Ring(tmp_path, "launch.max_restarts=1")
    began = time.monotonic()
    with ring.started():
        for life in range(2):
            ring.wait_until(lambda name=f"generator-1.{life}": started(ring, name), f"life {life} begins", may_end=True)
            ring.kill("generator-1")
        ring.finish(code=1)
    assert time.monotonic() - began < 120
    assert "rank 3 (generator-1): killed by SIGKILL; that is 2 in a row without progress in between" in ring.output


def started(ring: Ring, name: str) -> bool:
    return (ring.run / "journal" / f"{name}.jsonl").exists()
