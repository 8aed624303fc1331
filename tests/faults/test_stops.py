"""Rows 4 and 41: an actor stops for longer than its lease, then continues."""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Fault, Ring
from tools import run as runs

pytestmark = pytest.mark.soak

SILENT_S = 1.5  # as in ring.toml
SLACK_S = 2.0
STOPPED_S = 60.0
BOUND = 8  # (eta + 1) * B
FLAT = 4 << 20
STILL = ("spans", "wait", "stall", "push", "push_broken", "publish")  # lines of a head for whom nobody works


def last_t(ring: Ring, events: tuple[str, ...] = ()) -> float:
    """Time of the head's last of these events; by default of all events except STILL."""
    lines = ring.lines(*events, role="head")
    return float(max(line["t"] for line in lines if events or line["event"] not in STILL))


@dataclass(frozen=True)
class Stopped:
    ring: Ring
    fault: Fault  # generator-0, with a complete sample that it has not reported
    resumed: float


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stopped]:
    ring = Ring(tmp_path_factory.mktemp("stopped"), "run.total_train_steps=12")
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for_version(2, "generator-0.0", "generator-1.0")
        ring.throttle(0.05)
        ring.set_failpoint("completed", "stop", who="generator-0")
        ring.hold_learner(3)
        fault = ring.wait_for_failpoint("completed")
        ring.throttle(0.5)  # the other one will be at it for a while
        ring.wait_for("lease", after=fault.t, holder="generator-1.0")
        resumed = ring.resume_process(fault.pid)
        ring.wait_for("refused", after=resumed, what="Scored")
        ring.throttle(None)
        ring.wait_for("member", name=fault.name, state="healthy", after=resumed)
        ring.hold_learner(None)
        ring.finish()
        ring.check_survived()
        yield Stopped(ring, fault, resumed)


def test_row_04_prompts_of_a_stopped_generator_are_leased_to_another(stopped: Stopped) -> None:
    ring, fault = stopped.ring, stopped.fault
    (dead,) = ring.lines("member", name=fault.name, state="dead")
    assert SILENT_S - 0.5 <= dead["t"] - fault.t <= SILENT_S + SLACK_S
    before = {x["uid"]: x["attempt"] for x in ring.lines("lease", holder=fault.name) if x["t"] < fault.t}
    again = [x for x in ring.lines("lease", after=dead["t"] - 0.001) if x["uid"] in before]
    assert again
    for line in again:
        assert (line["holder"], line["attempt"]) == ("generator-1.0", before[line["uid"]] + 1)
        assert line["t"] - fault.t < 5.0


def test_row_04_a_late_result_is_refused_by_its_attempt(stopped: Stopped) -> None:
    """The sample was complete when its generator stopped. Its prompt was leased again, and the new sample counts."""
    ring = stopped.ring
    refused = ring.lines("refused", role="head", after=stopped.resumed)
    late = {x["what"]: x for x in reversed(refused) if x["sender"] == stopped.fault.name or x["what"] == "Scored"}
    uid = late["Sampled"]["uid"]
    assert late["Sampled"]["why"] == f"{stopped.fault.name} does not hold prompt {uid} at attempt 0"
    uid = late["Scored"]["uid"]
    assert late["Scored"]["why"] == f"prompt {uid} is at attempt 1 (leased); got attempt 0"


def test_row_04_a_generator_that_goes_on_is_stale_until_a_push(stopped: Stopped) -> None:
    """The same incarnation rejoins and receives work again."""
    ring, fault = stopped.ring, stopped.fault
    states = [x["state"] for x in ring.lines("member", name=fault.name) if x["t"] > stopped.resumed]
    assert states[:2] == ["stale", "healthy"]
    assert ring.lines("lease", holder=fault.name, after=stopped.resumed)  # I7: not before it is healthy
    assert len(list(runs.Run(ring.run).journals("generator"))) == 2


def test_row_41_stop_learner_for_a_minute(tmp_path: Path) -> None:
    """Generators continue to the credit limit and wait; memory does not grow; all continue by themselves."""
    ring = Ring(tmp_path, "run.total_train_steps=40", "watchdog.stall_s=10")
    ring.hold_learner(5)
    with ring.started():
        ring.wait_for("update", version=5)
        ring.hold_learner(20)
        ring.wait_for("batch", step=8)
        fault = ring.kill("learner-0", signal.SIGSTOP)
        ring.wait_until(lambda: last_t(ring, STILL) > last_t(ring) + 10, "everything comes to rest")
        rested = last_t(ring)
        parts = ("head-0", "generator-0", "generator-1", "reward-0")
        before = {who: ring.memory(who) for who in parts}
        ring.wait_for("spans", after=rested + STOPPED_S)
        after = {who: ring.memory(who) for who in parts}
        moved = [line for line in ring.lines(role="head", after=rested) if line["event"] not in STILL]
        ring.check(not moved, f"nothing moves while the learner stands still: {moved}")
        ring.resume_process(fault.pid)
        ring.hold_learner(None)
        ring.finish()
    ring.check_survived()
    assert {who: after[who] - before[who] for who in parts if after[who] - before[who] > FLAT} == {}
    last = [line for line in ring.lines("admit", role="head") if line["t"] < rested + STOPPED_S][-1]
    assert last["live"] + last["in_training"] == BOUND
    stall = ring.lines("stall", role="head", after=fault.t)[0]
    assert fault.name in stall["on"]
    assert not ring.lines("member", role="head", state="dead")
    assert {path.name.split(".")[1] for path in runs.Run(ring.run).journals()} == {"0"}
