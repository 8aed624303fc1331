"""Throughput grows with the generators: a guest joins a running job that waits for samples, and leaves it again.

A decode step sleeps far longer than it computes, so versions per second depend on the generators and not on the cores.
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.faults.ring import Ring
from tests.faults.test_guests import join

pytestmark = pytest.mark.soak

GUEST = "generator-1.0"  # beside the job's own generator-0
STEP_S = 0.02  # of a decode step
FACTOR = 1.3  # at least so many times the versions per second; two times are what there is to have
N = 16  # versions that are timed, alone and in company
SETTINGS = (
    "run.total_train_steps=100000",
    "rollout.max_concurrent_rollouts=2",  # a group at a time
    "rollout.max_head_offpolicyness=4",
    "actor.lr=1e-9",  # samples stay as long as they are
    "checkpoint.every_steps=0",
)


@dataclass(frozen=True)
class Paces:
    """Versions per second, by the head's journal."""

    before: float
    beside: float
    after: float


@pytest.fixture(scope="module")
def paces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Paces]:
    ring = Ring(tmp_path_factory.mktemp("elastic"), *SETTINGS, ranks=3)
    ring.throttle(STEP_S)
    with ring.started():
        before = pace(ring, after=0.0)
        guest = join(ring, "--join", str(ring.run))
        beside = pace(ring, after=ring.wait_for("lease", holder=GUEST)["t"])
        guest.send_signal(signal.SIGUSR1)
        ring.wait_until(lambda: guest.poll() is not None, "the guest leaves")
        gone = ring.wait_for("member", name=GUEST, state="left")
        after = pace(ring, after=gone["t"])
        assert guest.wait() == 0
        ring.throttle(None)
        ring.send(signal.SIGUSR1)
        ring.finish()
        ring.check_survived(ended=False)
        yield Paces(before, beside, after)


def pace(ring: Ring, *, after: float) -> float:
    """From the second publish after that time on: what was under way before is over."""
    began = ring.wait_for("publish", after=after, n=2)
    ended = ring.wait_for("publish", after=float(began["t"]), n=N, timeout_s=300.0)
    return N / (float(ended["t"]) - float(began["t"]))


def test_a_guest_brings_more_versions_a_second(paces: Paces) -> None:
    print(paces)
    assert paces.beside >= FACTOR * paces.before


def test_a_guest_that_has_left_takes_them_with_it(paces: Paces) -> None:
    assert paces.beside >= FACTOR * paces.after
