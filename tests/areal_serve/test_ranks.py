import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from areal_bus.errors import ConfigError
from areal_bus.process.commands import find_mpirun, mpirun_variables
from areal_bus.process.isolation import CHILD
from areal_serve.ranks import Start, exchange, sample
from launch.commands import local_job
from launch.commands.main import check_combinations, parse_arguments
from tests.areal_serve.processes import NoAnswer, Server, call, model_name, pids, result, serving
from tests.areal_serve.test_front import pass_body


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[1])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Open MPI's code is 1 when a signal ends it."""
    command = (find_mpirun(), "-np", "3", *CHILD, "areal_bus.launch")
    words = ("configs/tiny.toml", "--serve")
    folder = tmp_path_factory.mktemp("job")
    with serving(folder, *words, command=command, variables=mpirun_variables(), code=1) as found:
        yield found


@pytest.mark.slow
def test_job_of_mpirun_serves_from_its_ranks_and_goes_on_after_kills(job: Server) -> None:
    (front,), (trainer,), samplers = (pids(job, role) for role in ("front", "trainer", "sampler"))
    ranks = {parent_of(front), *map(parent_of, samplers)}
    assert parent_of(trainer) == front
    assert len(ranks) == 3
    session = call(job, "/create_session", {})["session_id"]
    base = {"session_id": session, "base_model": model_name(job)}
    id = result(job, "/create_model", {**base, "model_seq_id": 0, "lora_config": {"rank": 2}})["model_id"]
    call(job, "/create_sampling_session", {**base, "sampling_session_seq_id": 0})
    asked: dict[str, Any] = {"sampling_session_id": f"{session}:sample:0", "prompt": {"chunks": [{"tokens": [3, 4]}]}}
    asked["sampling_params"] = {"max_tokens": 4, "seed": 1}
    drawn = [result(job, "/asample", {**asked, "seq_id": 1})]
    for number, role in enumerate(("sampler", "front")):
        os.kill(pids(job, role)[0], signal.SIGKILL)
        drawn.append(retried(job, "/asample", {**asked, "seq_id": 2 + number}))
        step = {"model_id": id, "seq_id": 2 * number + 2, "adam_params": {"learning_rate": 1e-3}}
        retried(job, "/forward_backward", pass_body(id, 2 * number + 1))
        assert retried(job, "/optim_step", step)["metrics"]["step:max"] == number + 1
    assert drawn == [drawn[0]] * 3  # one seed
    assert {parent_of(pid) for pid in pids(job, "sampler")} < ranks


def test_sampler_rank_ends_when_rank_0_does_not_answer(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    codes = [sample(Start("RUN", "m", str(door)), 1, {}, patience_s=0.2) for door in (tmp_path, tmp_path / "removed")]
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    assert codes == [1, 0]
    assert capfd.readouterr().err.count("rank 1: timed out: no answer of rank 0 within launch.timeout_s = 0.2") == 1


def retried(server: Server, path: str, given: Any) -> Any:
    """The result, also when the front ends in the meantime: the same request is carried out once."""
    while True:
        with contextlib.suppress(ConnectionError, NoAnswer):
            return result(server, path, given)


class OneRank:
    """A rank whose others report what they are given."""

    rank, size = 0, 2

    def __init__(self, *others: bytes) -> None:
        self._others = others

    def allgather(self, data: bytes) -> list[bytes]:
        return [data, *self._others]

    def finish_exchanges(self) -> None: ...

    def close(self) -> None: ...


def test_ranks_of_a_server_are_on_one_host() -> None:
    with pytest.raises(ConfigError, match="ranks on several hosts"):
        exchange(OneRank(b'{"on": "another", "word": {}}'), {"run": "r", "model": "m", "door": "d"})


def test_fault_of_rank_0_ends_every_rank() -> None:
    with pytest.raises(ConfigError, match="missing model"):
        exchange(OneRank(b'{"on": "another", "word": {}}'), {"error": "missing model"})


@pytest.mark.parametrize("words", ["--dry-run", "--slurm", "--join x", "--key x --join y", "--explain actor", "--all"])
def test_serving_refuses_options_without_an_effect(words: str) -> None:
    with pytest.raises(ConfigError, match="leave out"):
        check_combinations(parse_arguments(["c.toml", "--serve", *words.split()]))


def test_port_is_for_serving() -> None:
    with pytest.raises(ConfigError, match="--port needs --serve"):
        check_combinations(parse_arguments(["c.toml", "--port", "80"]))


def test_run_command_names_the_command_that_serves() -> None:
    with pytest.raises(ConfigError, match="areal-bus serve"):
        local_job.main(["c.toml", "--serve"])
