"""Rows 14, 18 and 19: a generator joins a running job through a proxy, with keys. Real processes.

Each test injects a fault into the guest's connection; afterwards the guest is back with the published weights.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from areal_bus.core.members.membership import CEILING, N_INTERVALS
from tests.faults.proxy import Proxy
from tests.faults.ring import FOLDER, INSIDE, ROOT, Line, Ring, parent_of

pytestmark = pytest.mark.soak

GUEST = "generator-2.0"
SILENT_S = 1.5  # of tests/faults/ring.toml
SLACK_S = 3.0
TICK_S = 0.5  # until the head looks again


@dataclass(frozen=True)
class Outage:
    """One fault of the guest's connection."""

    began: float
    dead: Line  # the head's word on it
    back: Line  # it holds published weights again


@dataclass(frozen=True)
class Guest:
    ring: Ring
    outages: dict[str, Outage]
    code: int  # that it ended with


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guest]:
    ring = Ring(tmp_path_factory.mktemp("guest"), "run.total_train_steps=100000", "bus.transport=tcp", "bus.curve=on")
    outages: dict[str, Outage] = {}
    with ring.started():
        ring.wait_for("update", version=3)
        ring.throttle(0.02)
        invitation = ring.run / "join.json"
        proxy = Proxy(json.loads(invitation.read_text())["head"])
        process = join(ring, "--join", proxy.endpoint, "--key", str(invitation))
        ring.wait_for("member", name=GUEST, state="healthy")
        for name, fault in FAULTS.items():
            outages[name] = suffer(ring, proxy, fault)
        ring.throttle(None)
        ring.send(signal.SIGUSR1)
        ring.finish()
        yield Guest(ring, outages, process.wait(30))
    proxy.close()


def join(ring: Ring, *arguments: str) -> "subprocess.Popen[str]":
    words = [sys.executable, "-m", "areal_bus.launch", *arguments]
    ours = {FOLDER: str(ring.folder), "PYTHONPATH": str(INSIDE), "OMP_NUM_THREADS": "1"}
    with (ring.folder / "output.txt").open("a") as output:
        return subprocess.Popen(words, cwd=ROOT, env=os.environ | ours, stdout=output, stderr=output, text=True)


def suffer(ring: Ring, proxy: Proxy, fault: Callable[[Proxy], object]) -> Outage:
    """While it holds a lease."""
    ring.wait_for("lease", holder=GUEST, after=time.monotonic())
    began = time.monotonic()
    fault(proxy)
    dead = ring.wait_for("member", name=GUEST, state="dead", after=began)
    proxy.heal()
    back = ring.wait_for("member", name=GUEST, state="healthy", after=dead["t"])
    return Outage(began, dead, back)


def part(proxy: Proxy) -> None:
    proxy.part()
    proxy.cut(silently=True)


FAULTS: dict[str, Callable[[Proxy], object]] = {
    "cut": lambda proxy: proxy.cut(),
    "deaf": lambda proxy: setattr(proxy.down, "is_open", False),
    "dumb": lambda proxy: setattr(proxy.up, "is_open", False),
    "parted": part,
}


def test_the_run_survives_its_guest(guest: Guest) -> None:
    guest.ring.check_survived(ended=False)
    assert guest.code == 0
    assert list(guest.outages) == list(FAULTS)


@pytest.mark.parametrize("fault", FAULTS)
def test_prompts_of_a_dead_guest_are_leased_to_others(guest: Guest, fault: str) -> None:
    """Each prompt that it held, and that was not complete by the verdicts under way, is leased again at once."""
    ring, outage = guest.ring, guest.outages[fault]
    held: set[int] = set()
    for line in ring.lines("lease", "ready", "refund", role="head"):
        if line["t"] > outage.dead["t"]:
            break
        held.discard(line["uid"])
        if line.get("holder") == GUEST:
            held.add(line["uid"])
    after = ring.lines("lease", role="head", after=outage.dead["t"])
    assert held <= {line["uid"] for line in after if line["t"] < outage.dead["t"] + SLACK_S}


def test_row_14_a_generator_whose_connection_breaks_joins_again(guest: Guest) -> None:
    outage = guest.outages["cut"]
    assert outage.dead["why"] == "its connection is gone"
    assert outage.dead["t"] - outage.began < SILENT_S  # sooner than by silence
    assert guest.ring.lines("joined", role="head", name=GUEST, after=outage.dead["t"])


@pytest.mark.parametrize(("fault", "why"), [("deaf", "it does not hear the head"), ("dumb", "silent for 1.5 s")])
def test_row_18_a_connection_that_goes_one_way_is_noticed_by_both(guest: Guest, fault: str, why: str) -> None:
    outage = guest.outages[fault]
    assert outage.dead["why"] == why
    assert outage.dead["t"] - outage.began < SILENT_S + SLACK_S


def test_row_19_a_partition_that_heals_leaves_the_guest_where_it_was(guest: Guest) -> None:
    outage = guest.outages["parted"]
    before = guest.outages["dumb"]  # a member has three times its longest silence so far
    limit_s = N_INTERVALS * (before.back["t"] - before.began)
    assert outage.dead["t"] - outage.began < min(limit_s, CEILING * SILENT_S) + TICK_S
    assert outage.back["t"] - outage.dead["t"] < 30.0


def test_a_guest_ends_with_a_sentence_when_its_job_was_killed_and_cannot_come_back_to_it(tmp_path: Path) -> None:
    ring = Ring(tmp_path, "run.total_train_steps=100000", "bus.transport=tcp", "launch.timeout_s=45")
    with ring.started():
        ring.wait_for("update", version=2)
        process = join(ring, "--join", str(ring.run))
        ring.wait_for("member", name=GUEST, state="healthy")
        killed = ring.kill("head-0")  # one that comes back within launch.timeout_s is joined again
        ring.wait_for("member", name=GUEST, state="healthy", after=killed.t)
        head = json.loads((ring.run / "join.json").read_text())["head"]
        guest = {pid for pid in ring.pids() if pid == process.pid or parent_of(pid) == process.pid}
        for pid in sorted(ring.pids() - guest):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        began = time.monotonic()
        ring.wait_until(lambda: process.poll() is not None, "the guest ends", may_end=True)
        assert process.wait() == 1
        assert time.monotonic() - began > 30
        assert (
            f"rank 6 (generator-2): timed out: the head at {head} was silent for longer than launch.timeout_s"
            in ring.output
        )
        again = join(ring, "--join", str(ring.run))
        assert again.wait(60) == 2
        assert f"error: the job of {ring.run} is not running: only a running job can be joined" in ring.output
