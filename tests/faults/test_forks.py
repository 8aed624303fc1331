"""Rings with launch.start = "fork": deaths of actors, of the fork server and of what the launcher started."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.faults.ring import Ring, parent_of

FORK = ('launch.start="fork"', 'launch.bootstrap="env"')
RANKS = 8


def command_of(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.slow
def test_a_forked_actor_that_dies_is_forked_again(tmp_path: Path) -> None:
    """Actors of all ranks are forks of supervisors, which are forks of one process. The next incarnation is, too."""
    changes = (*FORK, "run.total_train_steps=1000", "topology.learners=2", "topology.generators=5")
    ring = Ring(tmp_path, *changes, ranks=RANKS)
    ring.hold_learner(4)
    with ring.started():
        ring.wait_for("update", version=4)
        supervisor = parent_of(ring.actor("generator-0")[0])
        servers = {
            parent_of(parent_of(ring.actor(who)[0])) for who in ("generator-0", "reward-0", "learner-1", "head-0")
        }
        assert len(servers) == 1
        assert b"launch.fork.fork_server" in command_of(servers.pop())
        deaths = [ring.kill(who) for who in ("generator-0", "reward-0")]
        for death in deaths:
            ring.wait_for("joined", name=death.next, after=death.t)
        assert parent_of(ring.actor("generator-0")[0]) == supervisor
        death = ring.kill("learner-1")
        ring.wait_for("joined", name=death.next, after=death.t)
        ring.hold_learner(None)
        ring.wait_for("update", version=6)
        ring.send(signal.SIGUSR1)  # to mpirun, which sends it to the attendants
        ring.finish()
        assert json.loads((ring.run / "summary.json").read_text())["drained"]
        ring.check_survived(ended=False)


@pytest.mark.soak
@pytest.mark.parametrize("victim", ["fork server", "attendant"])
def test_no_process_survives_the_fork_server_or_mpiruns_child(tmp_path: Path, victim: str) -> None:
    with Ring(tmp_path, *FORK, ranks=3).started() as ring:
        ring.wait_for("update", version=1)
        server = parent_of(parent_of(ring.actor("generator-0")[0]))
        ranks = [pid for pid in ring.pids() if parent_of(pid) == ring._processes[0].pid]
        assert len(ranks) == 3
        os.kill(server if victim == "fork server" else max(ranks), signal.SIGKILL)
        ring.wait_until(lambda: not ring.is_up, "mpirun ends", may_end=True)
        ring.wait_until(lambda: not ring.pids(), f"no process is left: {ring.pids()}", may_end=True)
        assert [process.wait() for process in ring._processes] != [0]
