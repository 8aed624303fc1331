"""A job over four hosts with their own networks: encrypted, one link slow, one cut and healed, one host lost."""

import time
from pathlib import Path

import pytest

from tests.faults.ring import SPAWN, Ring
from tests.support.hosts import INTERFACE, Hosts, hosts

LEARNER, REWARD, LOST, SLOW = range(4)  # ranks of the ring, one a host; the head is beside the learner


def ring_over(four: Hosts, folder: Path, *changes: str) -> Ring:
    network = (f"bus.interface='{INTERFACE}'", f"launch.rendezvous='tcp://{four.address(0)}:7077'")
    return Ring(folder, *SPAWN, *network, *changes, bootstrap="env", before=four.words)


@pytest.mark.slow
@pytest.mark.parametrize(
    "host", [pytest.param(LOST, id="generator"), pytest.param(LEARNER, id="head-and-learner", marks=pytest.mark.soak)]
)
def test_a_job_over_four_hosts_survives_a_cut_a_slow_link_and_a_lost_host(tmp_path: Path, host: int) -> None:
    with hosts(4) as four:
        four.throttle(SLOW, "4mbit")
        ring = ring_over(four, tmp_path, "run.total_train_steps=20")
        ring.throttle(0.01)
        ring.hold_learner(14)
        with ring.started():
            ring.wait_for(
                "member", name="generator-0.0", state="healthy"
            )  # a silent one that still loads holds no work
            ring.wait_for("update", version=2)
            began = time.monotonic()
            four.cut(host)
            lost = ring.wait_for("member", name="generator-0.0", state="dead", after=began)
            four.heal(host)
            ring.wait_for("member", name="generator-0.0", state="healthy", after=lost["t"])
            four.kill(LOST)
            ring.wait_for("member", name="generator-0.0", state="dead", after=lost["t"])
            ring.throttle(None)
            ring.hold_learner(None)
            ring.finish(killed=[LOST])
        ring.check_survived()
