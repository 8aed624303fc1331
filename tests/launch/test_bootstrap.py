"""Rendezvous of the ranks, with real processes."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.errors import ConfigError
from launch.run.bootstrap import EnvBootstrap, RanksMissing, is_one_host_of_open_mpi, pack, rank_and_size, unpack
from launch.run.job_id import job_id

ROOT = Path(__file__).parents[2]
ALLGATHER_PROGRAM = """
import json, sys
from areal_bus.config.sections import LaunchConfig
from launch.run.bootstrap import open_bootstrap
b = open_bootstrap(LaunchConfig(bootstrap=sys.argv[1], rendezvous=sys.argv[2], timeout_s=60))
first = b.allgather(bytes([b.rank]) * 1000 * b.rank)
second = b.allgather(str(b.rank).encode())
ok = first == [bytes([r]) * 1000 * r for r in range(b.size)] and second == [str(r).encode() for r in range(b.size)]
b.close()
sys.stdout.write(json.dumps([b.rank, ok]) + "\\n") if sys.argv[1] == "env" else sys.stdout.write(f"{ok}\\n")
"""
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPIRUN = shutil.which("mpirun", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))


def start(rank: int, size: int, *, job: str, rendezvous: str = "") -> "subprocess.Popen[str]":
    environ = os.environ | {"RANK": str(rank), "WORLD_SIZE": str(size), "TORCHELASTIC_RUN_ID": job}
    command = [sys.executable, "-c", ALLGATHER_PROGRAM, "env", rendezvous]
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.parametrize("rendezvous", ["", "ipc"])
def test_ranks_meet_through_the_environment_alone(tmp_path: Path, rendezvous: str) -> None:
    where = f"ipc://{tmp_path}/meet" if rendezvous else ""
    ranks = [start(rank, 3, job=str(tmp_path), rendezvous=where) for rank in (2, 1, 0)]
    answers = sorted(json.loads(rank.communicate(timeout=60)[0]) for rank in ranks)
    assert answers == [[0, True], [1, True], [2, True]]


def test_a_rendezvous_leaves_no_folder(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": str(tmp_path)}
    left = rendezvous_sockets()  # of killed jobs
    alone = EnvBootstrap("", 5, environ)
    assert alone.allgather(b"x") == [b"x"]
    alone.close()
    assert rendezvous_sockets() <= left


def test_two_launches_of_a_user_on_one_host_have_two_ids_and_their_ranks_one() -> None:
    """torchrun without --rdzv-id gives all its jobs the run id "none"; they differ in the port of their store."""
    torchrun = {"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "localhost"}
    launches: list[list[dict[str, str]]] = [
        [torchrun | {"MASTER_PORT": "29500", "RANK": rank} for rank in "01"],
        [torchrun | {"MASTER_PORT": "29501", "RANK": "0"}],
        [torchrun | {"TORCHELASTIC_RUN_ID": "mine", "MASTER_PORT": "29500"}],
        [{"TORCHELASTIC_RUN_ID": "mine"}],
        [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": step, "SLURM_PROCID": rank} for step in "0" for rank in "01"],
        [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}],
        [{"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"} | torchrun | {"MASTER_PORT": port} for port in ("29500",)],
        [{"PMIX_NAMESPACE": "prterun-host-1@1", "OMPI_COMM_WORLD_RANK": rank} for rank in "01"],
        [{}, {"RANK": "1", "MASTER_PORT": "29500"}, {"TORCHELASTIC_RUN_ID": "none"}],
    ]
    ids = [{job_id(environ, alone="parent-1") for environ in ranks} for ranks in launches]
    assert [len(of_ranks) for of_ranks in ids] == [1] * len(launches)
    assert len(set.union(*ids)) == len(launches)
    assert job_id({}, alone="parent-1") != job_id({}, alone="parent-2")


def rendezvous_sockets() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob(f"areal-bus-{os.getuid()}-*/rendezvous.sock"))


@pytest.mark.parametrize(("rank", "missing"), [("0", "rank 1 did not come"), ("1", "rank 0 did not answer")])
def test_the_error_names_a_rank_that_does_not_arrive_or_answer(tmp_path: Path, rank: str, missing: str) -> None:
    waiting = EnvBootstrap(f"ipc://{tmp_path}/meet", 0.2, {"RANK": rank, "WORLD_SIZE": "2"})
    with pytest.raises(RanksMissing, match=rf"launch\.timeout_s = 0\.2: {missing}"):
        waiting.allgather(b"")
    waiting._socket.setsockopt(zmq.LINGER, 0)  # its message has no receiver
    waiting.close()


def test_a_taken_rendezvous_is_refused(tmp_path: Path) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "1"}
    first = EnvBootstrap("tcp://127.0.0.1:*", 1, environ)
    url = first._socket.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(ConfigError, match=r"launch\.rendezvous must be free at rank 0"):
        EnvBootstrap(url, 1, environ)
    first.close()


@pytest.mark.parametrize("rank", ["0", "1"])
def test_an_invalid_rendezvous_is_refused_at_every_rank(rank: str) -> None:
    with pytest.raises(ConfigError, match=r"launch\.rendezvous must"):
        EnvBootstrap("foo", 1, {"RANK": rank, "WORLD_SIZE": "2"})


@given(st.lists(st.binary(max_size=100)))
def test_parts_survive_packing(parts: list[bytes]) -> None:
    assert unpack(pack(parts)) == parts


@pytest.mark.parametrize(
    "names", [("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"), ("PMI_RANK", "PMI_SIZE"), ("RANK", "WORLD_SIZE")]
)
def test_rank_and_size_come_from_the_launchers_environment(names: tuple[str, str]) -> None:
    assert rank_and_size({names[0]: "3", names[1]: "8"}) == (3, 8)
    assert rank_and_size({}) == (0, 1)


@pytest.mark.parametrize(
    ("environ", "is_one"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, False),
        ({"OMPI_COMM_WORLD_SIZE": "4"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.1.0"}, False),
        ({"PMI_RANK": "0", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}, False),
        ({}, False),
    ],
)
def test_open_mpi_is_restricted_to_one_host_only_where_its_launcher_requires_it(
    environ: dict[str, str], is_one: bool
) -> None:
    """srun --mpi=pmix and MPICH do not set these variables: two that are absent are no equal sizes."""
    assert is_one_host_of_open_mpi(environ) is is_one


@pytest.mark.parametrize(("rank", "size"), [("x", "3"), ("0", ""), ("3", "3"), ("-1", "3"), ("1.0", "3")])
def test_an_invalid_rank_or_size_is_refused(rank: str, size: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"must number ranks from 0 to size - 1: RANK is '{rank}' and WORLD_SIZE '{size}'"
    ):
        rank_and_size({"RANK": rank, "WORLD_SIZE": size})


@pytest.mark.skipif(MPIRUN is None, reason="there is no mpirun beside this Python or on the path")
def test_ranks_meet_through_mpi() -> None:
    command = [str(MPIRUN), "--oversubscribe", "-np", "3", sys.executable, "-c", ALLGATHER_PROGRAM, "mpi", ""]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | MPI, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout.split() == ["True"] * 3, done.stderr
    assert done.returncode == 0
