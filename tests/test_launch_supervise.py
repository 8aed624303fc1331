"""A rank's supervisor, with real small children in place of actors."""

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from actors.context import Context
from launch.supervise import Supervisor, environment

ROOT = Path(__file__).parents[1]
READ = "import os, sys, signal, time; line = sys.stdin.readline(); "
WAIT = READ + "sys.stdin.read()"
STUBBORN = READ + "signal.signal(signal.SIGTERM, signal.SIG_IGN); open({!r}, 'w').close(); time.sleep(60)"
SUPERVISOR = """
import sys
from launch import supervise
from tests.test_launch_supervise import context

class Announced(supervise.Signals):
    def __enter__(self):
        super().__enter__()
        print(rank.children[0].process.pid, flush=True)
        return self

supervise.Signals = Announced
rank = supervise.Supervisor(rank=3, grace_s=5, command=[sys.executable, "-c", sys.argv[1]])
rank.start(context(index=0))
sys.exit(rank.wait())
"""
ACTOR = """
import sys, threading
from actors.start import end_with_supervisor
sys.stdin.readline()
threading.Thread(target=end_with_supervisor, daemon=True).start()
print("up", flush=True)
threading.Event().wait()
"""


def context(*, index: int = 0, role: str = "reward") -> Context:
    return Context(
        role=role,
        index=index,
        incarnation=0,
        rank=3,
        job="j",
        head="ipc:///nowhere",
        address="127.0.0.1",
        interface="lo",
        device="cpu",
        n_generators=1,
        n_rewards=1,
        n_learners=1,
        run_folder="/nowhere",
        config_folder="/nowhere",
        model_folder="/nowhere",
    )


def supervise(*codes: str, grace_s: float = 5.0) -> tuple[int, Supervisor]:
    """Exit code of a supervisor whose children run these lines of Python."""
    supervisor = Supervisor(rank=3, grace_s=grace_s)
    for index, code in enumerate(codes):
        supervisor.command = [sys.executable, "-c", code]
        supervisor.start(context(index=index))
    return supervisor.wait(), supervisor


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state == "Z"


def ends_within(pid: int, timeout_s: float) -> bool:
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def test_all_actors_that_end_well_end_the_rank_well() -> None:
    assert supervise(READ, READ)[0] == 0


def test_a_rank_without_actors_is_done() -> None:
    assert Supervisor(rank=0, grace_s=1).wait() == 0


def test_an_actor_gets_its_context_as_a_line() -> None:
    check = "from actors.context import Context; sys.exit(Context.from_json(line).name != 'reward-0.0')"
    assert supervise(READ + check)[0] == 0


def test_a_failed_actor_ends_the_others_and_the_rank(capfd: pytest.CaptureFixture[str]) -> None:
    code, supervisor = supervise(WAIT, READ + "sys.exit(7)")
    assert code == 1
    assert capfd.readouterr().err == "rank 3 (reward-1): ended with exit code 7\n"
    assert all(gone(child.process.pid) for child in supervisor.children)


def test_a_config_error_found_late_keeps_its_code() -> None:
    assert supervise(READ + "sys.exit(2)")[0] == 2


def test_an_actor_killed_by_a_signal_is_named(capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = supervise(READ + "os.kill(os.getpid(), signal.SIGKILL)")
    assert code == 1
    assert capfd.readouterr().err == "rank 3 (reward-0): killed by SIGKILL\n"


def test_an_actor_that_ignores_sigterm_is_killed_after_the_grace_time(tmp_path: Path) -> None:
    began, met = time.monotonic(), str(tmp_path / "met")
    os.mkfifo(met)  # the second fails once the first ignores SIGTERM
    code, supervisor = supervise(STUBBORN.format(met), READ + f"open({met!r}).read(); sys.exit(1)", grace_s=0.3)
    assert code == 1
    assert supervisor.children[0].process.returncode == -signal.SIGKILL
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_actors_and_rank(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SUPERVISOR, WAIT]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        rank.send_signal(number)
        assert rank.wait(10) == 128 + number
    assert gone(child)


def test_an_actor_ends_with_a_supervisor_that_is_killed() -> None:
    command = [sys.executable, "-c", SUPERVISOR, ACTOR]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        assert rank.stdout.readline() == "up\n"
        rank.kill()
        assert ends_within(child, 10)


def test_actors_see_nothing_of_the_starter_and_one_thread() -> None:
    outer = {"OMPI_X": "1", "PMIX_Y": "1", "PMI_RANK": "1", "RANK": "0", "HOME": "/h", "PYTHONPATH": "/mine"}
    inner = environment(outer, gpus=(), cpu=True)
    assert not [name for name in inner if name.startswith(("OMPI", "PMI")) or name == "RANK"]
    assert inner["HOME"] == "/h"
    assert inner["PYTHONPATH"] == f"{ROOT}:/mine"
    assert (inner["OMP_NUM_THREADS"], inner["OMP_WAIT_POLICY"], inner["CUDA_VISIBLE_DEVICES"]) == ("1", "PASSIVE", "")


def test_an_actor_sees_its_gpus_only() -> None:
    assert environment({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, gpus=(2, 3), cpu=False)["CUDA_VISIBLE_DEVICES"] == "2,3"
