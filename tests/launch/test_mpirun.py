"""A job of two ranks under a real mpirun, with small scripts as actors: deaths, drain and the end."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from actors.runtime.process import LEFT
from tests.launch.test_bootstrap import MPI, MPIRUN
from tests.launch.test_supervise import ends_within
from tests.support.polling import wait_until

ROOT = Path(__file__).parents[2]
RANK = """
import sys
from pathlib import Path
from areal_bus.config.sections import LaunchConfig
from launch.run.bootstrap import open_bootstrap
from launch.run.process import block_drain_signal
from launch.run.supervise import Supervisor
from tests.launch.test_supervise import context
block_drain_signal()
launch = LaunchConfig(timeout_s=60)
bootstrap = open_bootstrap(launch)
bootstrap.allgather(b"")
run = Path(sys.argv[1])
rank = Supervisor(rank=bootstrap.rank, launch=launch, run=run, n_ranks=2, waits_for_job=True)
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
    "from actors.runtime import process; process.listen_for_drain(); run = Path(told['run_folder'])\n"
    "while not process.drain_requested(): time.sleep(0.01)\n"
    "(run / 'summary.tmp').write_text('{\"code\": 0}'); (run / 'summary.tmp').rename(run / 'summary.json')\n"
)
GENERATOR = (
    READ
    + f"LEFT = {LEFT}\n"
    + "os.write(1, f\"{told['incarnation']} {os.getpid()}\\n\".encode())\n"
    + "told['incarnation'] == 2 and sys.exit(LEFT)\ntime.sleep(60)\n"
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
def test_ctrl_c_names_the_newest_checkpoint_although_mpirun_drops_rank_output(tmp_path: Path) -> None:
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
        assert f"the newest checkpoint is {tmp_path / 'checkpoints' / 'step-000010'}" in said
        assert f"mpirun -np 2 python -m areal_bus.launch --resume {tmp_path} continues from it" in said
        assert ends_within(int(pid), 60)


@needs_mpirun
@pytest.mark.parametrize("is_terminal", [False, True])
def test_output_is_styled_and_as_wide_as_the_terminal_of_mpiruns_own_output(is_terminal: bool) -> None:
    """Standard output of a rank is a pseudo-terminal in both cases."""
    code = "import os, launch.run.process as p; p.note_terminal(); print(*map(os.environ.get, (p.STYLED, p.COLUMNS)))"
    reader, writer = os.openpty() if is_terminal else os.pipe()
    if is_terminal:
        termios.tcsetwinsize(writer, (24, 70))
    with open(reader, "rb", buffering=0) as output:
        command = [str(MPIRUN), "-np", "1", sys.executable, "-c", code]
        with subprocess.Popen(command, cwd=ROOT, env=os.environ | MPI, stdout=writer):
            assert output.read(100).decode().split()[:2] == (["1", "70"] if is_terminal else ["0", "0"])
            os.close(writer)


# mpirun is killed while its ranks start

STUCK = """
import os, sys, time
from areal_bus.process.parent_death import die_with_starter
die_with_starter()
from areal_bus.config.sections import LaunchConfig
from launch.run.bootstrap import open_bootstrap
print(os.getpid(), flush=True)
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    time.sleep(600)  # rank 0 waits for it in MPI_Init
open_bootstrap(LaunchConfig(timeout_s=float(sys.argv[1])))
"""
MARK = "AREAL_BUS_TEST_JOB"
PATIENCE_S = 60.0


@contextlib.contextmanager
def mpirun(n: int, *words: str, mark: str = "") -> "Iterator[subprocess.Popen[str]]":
    command = [str(MPIRUN), "--oversubscribe", "-np", str(n), sys.executable, *words]
    pipe, environment = subprocess.PIPE, os.environ | MPI | {MARK: mark}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True) as job:
        try:
            yield job
        finally:
            job.kill()


def marked(mark: str) -> dict[int, str]:
    """Processes of the job with this mark, mpirun included, with their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found


def runs(mark: str, module: str) -> bool:
    return any(is_python(module, words) for words in marked(mark).values())


def is_python(module: str, words: str) -> bool:
    """Whether the command line is Python running this module, not mpirun's."""
    return words.startswith(sys.executable) and f"-m {module} " in f"{words} "


MOMENTS: dict[str, Callable[[str], bool]] = {
    "mpirun is there": lambda mark: bool(marked(mark)),
    "the first rank begins": lambda mark: runs(mark, "areal_bus.launch"),
    "rank 0 checks the settings": lambda mark: runs(mark, "launch.run.prepare"),
    "the first actor begins": lambda mark: runs(mark, "actors.runtime.start"),
}


@needs_mpirun
@pytest.mark.slow
@pytest.mark.parametrize(
    "moment", [pytest.param(one, marks=[] if one == "the first actor begins" else pytest.mark.soak) for one in MOMENTS]
)
def test_no_process_survives_an_mpirun_killed_while_its_ranks_start(tmp_path: Path, moment: str) -> None:
    """Ranks stayed in MPI_Init for minutes."""
    mark = f"{os.getpid()}-{list(MOMENTS).index(moment)}"
    folder = f"run.folder={json.dumps(str(tmp_path))}"
    with mpirun(3, "-m", "areal_bus.launch", "configs/tiny.toml", "--set", folder, mark=mark) as job:
        wait_until(lambda: MOMENTS[moment](mark), moment)
        job.kill()
        job.wait()
        wait_until(lambda: not marked(mark), f"all have ended; left: {marked(mark)}")


@needs_mpirun
def test_ranks_that_wait_in_mpi_init_end_with_mpirun() -> None:
    with mpirun(2, "-c", STUCK, "600") as job:
        assert job.stdout is not None
        ranks_ = [int(job.stdout.readline()) for _ in range(2)]
        job.kill()
        assert all(ends_within(pid, PATIENCE_S) for pid in ranks_)


@pytest.mark.slow
@needs_mpirun
def test_mpi_init_has_the_deadline_of_the_launch_and_a_rank_over_it_is_named() -> None:
    with mpirun(2, "-c", STUCK, "1") as job:
        _, said = job.communicate(timeout=PATIENCE_S)
        assert job.returncode != 0
    assert "rank 0: MPI_Init must return within launch.timeout_s = 1; process " in said
    assert "rank 1: MPI_Init" not in said


def test_a_parent_that_has_ended_before_the_kernel_knew_ends_its_child() -> None:
    """The race between a look at the parent and the call that asks for the signal."""
    child = "from areal_bus.process.parent_death import die_with_parent; die_with_parent(1 << 22); print('alive')"
    done = subprocess.run([sys.executable, "-c", child], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")
