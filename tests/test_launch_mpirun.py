"""What mpirun sees of a rank whose actors die, drain and end: over a real mpirun, with small children as actors."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_launch_bootstrap import MPI, MPIRUN
from tests.test_launch_supervise import ends_within

ROOT = Path(__file__).parents[1]
RANK = """
import sys
from pathlib import Path
from areal_bus.config import LaunchConfig
from launch.bootstrap import open_bootstrap
from launch.signals import hold_back
from launch.supervise import Supervisor
from tests.test_launch_supervise import context
hold_back()
launch = LaunchConfig(timeout_s=60)
bootstrap = open_bootstrap(launch)
bootstrap.allgather(b"")
run = Path(sys.argv[1])
rank = Supervisor(rank=bootstrap.rank, launch=launch, run=run, n_ranks=2, stays=True)
rank.command = [sys.executable, "-c", sys.argv[2 + bootstrap.rank]]
rank.start(context(role=["head", "generator"][bootstrap.rank], run=run))
code = rank.wait()
if code:
    import os
    os._exit(code)
bootstrap.close()
"""
READ = "import json, os, signal, sys, time; from pathlib import Path; told = json.loads(sys.stdin.readline())\n"
HEAD = READ + (
    "from actors import draining; draining.listen(); run = Path(told['run_folder'])\n"
    "while not draining.asked(): time.sleep(0.01)\n"
    "(run / 'summary.tmp').write_text('{\"code\": 0}'); (run / 'summary.tmp').rename(run / 'summary.json')\n"
)
GENERATOR = (
    READ
    + "os.write(1, f\"{told['incarnation']} {os.getpid()}\\n\".encode()); told['incarnation'] == 2 or time.sleep(60)"
)


needs_mpirun = pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun beside this Python or on the path")


@contextlib.contextmanager
def ranks(run: Path, head: str, generator: str) -> "Iterator[subprocess.Popen[str]]":
    """A job of two ranks with an actor each."""
    command = [str(MPIRUN), "--oversubscribe", "-np", "2", sys.executable, "-c", RANK, str(run), head, generator]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, env=os.environ | MPI, stdout=pipe, stderr=pipe, text=True) as job:
        try:
            yield job
        finally:
            job.terminate()


@needs_mpirun
def test_mpirun_notices_no_death_of_an_actor_and_a_drained_job_ends_with_0(tmp_path: Path) -> None:
    with ranks(tmp_path, HEAD, GENERATOR) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        for incarnation in range(2):
            born, pid = job.stdout.readline().split()
            assert int(born) == incarnation
            os.kill(int(pid), signal.SIGKILL)
        assert job.stdout.readline().startswith("2 ")  # it is done at once, and its rank stays
        job.send_signal(signal.SIGUSR1)
        assert job.wait(60) == 0
        said = job.stderr.read()
    assert "rank 1 (generator-0): killed by SIGKILL; started again as generator-0.1\n" in said
    assert "rank 0: SIGUSR1: drains" in said


@needs_mpirun
def test_ctrl_c_says_which_checkpoint_is_safe_though_mpirun_has_stopped_listening(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-000010").mkdir(parents=True)
    (tmp_path / "frontiers").mkdir()
    (tmp_path / "frontiers" / "frontier-000010").touch()
    with ranks(tmp_path, HEAD, GENERATOR) as job:
        assert job.stdout is not None
        assert job.stderr is not None
        _, pid = job.stdout.readline().split()
        job.send_signal(signal.SIGINT)
        assert job.wait(60) != 0
        said = job.stderr.read()
        assert f"{tmp_path / 'checkpoints' / 'step-000010'} is safe" in said
        assert f"mpirun -np 2 python -m areal_bus.launch --resume {tmp_path} goes on from there" in said
        assert ends_within(int(pid), 10)
