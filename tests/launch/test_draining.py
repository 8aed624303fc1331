"""Signals to a rank: drain when there is time, an immediate end otherwise."""

import signal
from pathlib import Path
from typing import Any

import pytest

from areal_bus.config.sections import LaunchConfig
from launch.run.process import resume_hint
from launch.run.supervise import Supervisor
from tests.launch.test_supervise import KILL, READ, WAIT, gone, line, rank

LISTEN = "from actors.runtime import process; process.listen_for_drain(); print('up', flush=True)\n"
UNTIL_ASKED = "while not process.drain_requested(): time.sleep(0.01)\n"


def test_an_immediate_end_names_the_newest_checkpoint_or_how_to_write_one(tmp_path: Path) -> None:
    again = f"python -m areal_bus.launch --resume {tmp_path} starts again at version 0"
    first = f"to write a checkpoint first, use kill -USR1 $(cat {tmp_path}/pid) instead"
    assert resume_hint(tmp_path, 0) == f"ends at once; there is no checkpoint yet; {again}; {first}"
    for name in ("checkpoints/step-000010", "checkpoints/step-000020", "checkpoints/step-000030", "frontiers"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("frontier-000010", "frontier-000020"):  # none for 30: it cannot be resumed
        (tmp_path / "frontiers" / name).touch()
    with rank(WAIT, role="head", run=tmp_path) as process:
        child = int(line(process))
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 128 + signal.SIGINT
        assert gone(child)
        assert process.stderr is not None
        safe = tmp_path / "checkpoints" / "step-000020"
        again = f"python -m areal_bus.launch --resume {tmp_path} continues from it"
        output = process.stderr.read()
        assert output.startswith(
            f"rank 3: Ctrl-C: ends at once; the newest checkpoint is {safe}, later updates are lost; {again}; "
        )


@pytest.mark.parametrize(("number", "bootstrap"), [(signal.SIGUSR1, "mpi"), (signal.SIGTERM, "env")])
def test_a_drain_request_reaches_the_head_even_before_it_listens(number: signal.Signals, bootstrap: str) -> None:
    head = READ + f"\nwhile not signal.sigpending(): time.sleep(0.01)\n{LISTEN}assert process.drain_requested()"
    with rank(head, role="head", bootstrap=bootstrap) as process:
        line(process)
        process.send_signal(number)
        assert process.wait(20) == 0
        assert process.stderr is not None
        assert process.stderr.read().startswith(f"rank 3: {number.name}: drains: writes a checkpoint and ends within ")


def test_a_restarted_head_gets_the_drain_request_again() -> None:
    head = READ + LISTEN + UNTIL_ASKED + f"inc or {KILL}"
    with rank(head, role="head") as process:
        line(process)
        assert line(process) == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == 0


def test_a_job_that_does_not_drain_in_time_ends_at_once() -> None:
    with rank(READ + LISTEN + "sys.stdin.read()", role="head", drain_s=0.1) as process:
        line(process)
        assert line(process) == "up\n"
        process.send_signal(signal.SIGUSR1)
        assert process.wait(10) == 128 + signal.SIGUSR1
        assert process.stderr is not None
        assert process.stderr.read().endswith("rank 3: not drained within launch.drain_s = 0.1: ends at once\n")


def test_a_second_request_ends_at_once_but_a_signal_delivered_twice_is_one() -> None:
    term, usr1, interrupt = signal.SIGTERM, signal.SIGUSR1, signal.SIGINT

    def handled(
        *received: tuple[float, signal.Signals], bootstrap: Any = "mpi", of_mpirun: int = 0
    ) -> list[int | None]:
        supervisor = Supervisor(rank=3, launch=LaunchConfig(bootstrap=bootstrap), n_ranks=of_mpirun)
        return [supervisor._handle_signals([number], now, is_orphan=False) for now, number in received]

    assert handled((5.0, usr1), (5.5, usr1), (7.0, usr1)) == [None, None, 128 + usr1]
    assert handled((5.0, usr1), (5.5, term)) == [None, 128 + term]
    assert handled((5.0, term), bootstrap="mpi") == [128 + term]
    assert handled((5.0, term), (5.5, term), (7.0, term), bootstrap="env") == [None, None, 128 + term]
    assert handled((5.0, interrupt), bootstrap="env") == [128 + interrupt]
    assert handled((5.0, term), bootstrap="env", of_mpirun=4) == [128 + term], "mpirun kills its ranks at once"
