"""How a sweep starts its jobs: forks of one process that has imported everything, with the results of fresh ones."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_bus.errors import ConfigError
from areal_bus.process.isolation import CHILD
from areal_lab.sweep.__main__ import main as sweep_main
from areal_lab.sweep.plan import METRICS, Job
from areal_lab.sweep.runner import named
from areal_lab.sweep.starting import JobStart, JobStarter, environment, log_of, loop_of, modules_of, start_of
from tests.areal_lab.test_sweep import BASE, HEAD, ROOT, SMALL, SMALL_SET, sweep_file
from tests.support.polling import wait_until
from tools.run import Run

LAG = "areal_lab.loops.exact_lag"
ALONE = JobStart(LAG, is_forked=False, n_cores=1)
FORKED = JobStart(LAG, is_forked=True, n_cores=1)
PATIENCE_S = 120.0  # a loaded machine


def job(**changes: object) -> Job:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    return Job(BASE, {}, SMALL | keys, 1, "0" * 64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "start"),
    [
        ({}, FORKED),
        ({"virtual_time__seconds": 40, "rollout__exact_lag": []},
         JobStart("areal_lab.loops.virtual_time", is_forked=True, n_cores=1)),
        ({"topology__gpus_per_host": 1}, ALONE),  # CUDA does not survive a fork
        ({"rollout__exact_lag": []}, JobStart(None, is_forked=True, n_cores=3)),
        ({"rollout__exact_lag": [], "launch__start": "spawn"}, JobStart(None, is_forked=False, n_cores=3)),
        ({"rollout__exact_lag": [], "launch__bootstrap": "env"}, JobStart(None, is_forked=False, n_cores=3)),
        ({"rollout__exact_lag": [], "topology__gpus_per_host": 1}, JobStart(None, is_forked=False, n_cores=3)),
    ],
)  # fmt: skip
def test_a_job_is_forked_unless_it_has_a_gpu_or_a_configured_start_method(
    changes: dict[str, object], start: JobStart
) -> None:
    assert start_of(job(**changes), ranks=3) == start
    assert loop_of(job(**changes).load()) == start.loop


def test_the_fork_server_imports_the_modules_of_the_sweeps_task() -> None:
    assert modules_of(job().load()) == []
    assert modules_of(job(data__task="reasoning-gym:spell_backward").load()) == ["actors.rewards.functions.reasoning"]


def processes(sweep: int) -> dict[int, str]:
    """Process id -> name: of the server, of what waits for its jobs, and of the jobs that this sweep has started."""
    found = {}
    for folder in Path("/proc").iterdir():
        try:
            line = (folder / "cmdline").read_bytes().decode().split("\0")
            is_of_sweep = f"areal-bus-sweep-{os.getuid()}-{sweep}-" in " ".join(line)
            if is_of_sweep or ("areal_lab.sweep.job_fork_server" in line and str(sweep) in line):
                found[int(folder.name)] = (folder / "comm").read_text().strip()
        except (OSError, IndexError):  # no process, or it has ended
            continue
    return found


@pytest.fixture
def starter(tmp_path: Path) -> Iterator[JobStarter]:
    made = JobStarter(tmp_path, ranks=3)
    yield made
    made.close()
    wait_until(lambda: not processes(os.getpid()))


def result_of(folder: Path) -> tuple[str, list[object]]:
    """The digest of the weights, and the figures of all evaluations."""
    digest = json.loads((folder / "summary.json").read_text())["digest"]
    return digest, [[line[name] for name in METRICS] for line in Run(folder).events("evaluation")]


@pytest.mark.slow
def test_a_forked_job_is_a_process_of_its_own_with_the_result_of_a_fresh_one(
    tmp_path: Path, starter: JobStarter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AREAL_BUS_ACTOR__LR", "1e-3")  # a job has the environment of the sweep
    small = job(rollout__exact_lag=2, run__seed=5)
    folders = [tmp_path / name for name in ("one", "two", "fresh")]
    started = [starter.start(small, FORKED, folder) for folder in folders[:2]]
    started.append(JobStarter(tmp_path / "alone", ranks=3).start(small, ALONE, folders[2]))  # with its own warm-up
    assert [process.wait(PATIENCE_S) for process in started] == [0, 0, 0], log_of(folders[0]).read_text()
    one, two, fresh = map(result_of, folders)
    assert len(fresh[1]) == 3
    assert one == two == fresh
    other = starter.start(job(rollout__exact_lag=2, run__seed=6), FORKED, tmp_path / "other")
    assert other.wait(PATIENCE_S) == 0
    assert result_of(tmp_path / "other")[0] != fresh[0]


@pytest.mark.slow
def test_a_forked_job_that_is_refused_or_killed_ends_as_a_fresh_one(
    tmp_path: Path, starter: JobStarter, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once the server is lost, jobs start by themselves."""
    small, long = job(), job(learner__warmup__steps=100_000)
    (tmp_path / "there").mkdir()
    refused = starter.start(small, FORKED, tmp_path / "there")
    assert refused.wait(PATIENCE_S) == 2
    assert log_of(tmp_path / "there").read_text().startswith("error: --out must be a new folder")

    def started(name: str) -> "tuple[subprocess.Popen[bytes], int]":
        """A job that has started, and its process id."""
        process = starter.start(long, FORKED, tmp_path / name)
        wait_until((tmp_path / name / "config.json").exists)
        return process, next(pid for pid, name in processes(os.getpid()).items() if name == "exact_lag")

    process, pid = started("killed")
    os.kill(pid, signal.SIGKILL)
    assert named(process.wait(PATIENCE_S)) == "killed by SIGKILL"
    process, pid = started("ended")
    process.terminate()
    assert named(process.wait(PATIENCE_S)) == "killed by SIGTERM"
    process, pid = started("orphan")
    process.kill()
    process.wait(PATIENCE_S)
    wait_until(lambda: pid not in processes(os.getpid()))

    process, pid = started("server")
    (server,) = [pid for pid, name in processes(os.getpid()).items() if name != "exact_lag" and is_server(pid)]
    os.kill(server, signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 1
    assert "the fork server of this host is lost" in log_of(tmp_path / "server").read_text()
    for _ in range(2):  # each is refused, as a fresh process is
        assert starter.start(small, FORKED, tmp_path / "there").wait(PATIENCE_S) == 2
    assert capfd.readouterr().err.count("has ended (exit code -9): each further job imports by itself") == 1


def is_server(pid: int) -> bool:
    return b"areal_lab.sweep.job_fork_server" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_server_with_threads_refuses_to_fork() -> None:
    """After its own imports it has one: or no job above would be forked."""
    code = (
        "import threading, time, areal_lab.sweep.job_fork_server as server; print(server.why_unsafe())\n"
        "threading.Thread(target=time.sleep, args=[20], daemon=True).start(); print(server.why_unsafe(), flush=True)"
    )
    done = subprocess.run(
        [*CHILD[:2], "-c", code], env=environment(), cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["", "a process forks while it has one thread: after the imports it has 2"]


@pytest.mark.slow
def test_no_process_survives_a_killed_sweep(tmp_path: Path) -> None:
    file = sweep_file(tmp_path, f'{HEAD}seeds = 2\n[set]\n{SMALL_SET}\n[grid]\n"learner.warmup.steps" = [100000]\n')
    out = tmp_path / "out"
    line = [sys.executable, "-m", "areal_lab.sweep", str(file), "--cores", "2", "--out", str(out)]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.DEVNULL) as sweep:
        try:
            wait_until(lambda: list(processes(sweep.pid).values()).count("exact_lag") == 2)
            with pytest.raises(ConfigError, match="another sweep runs in"):
                sweep_main(line[3:])
        finally:
            sweep.kill()
    wait_until(lambda: not processes(sweep.pid))
