"""Rows 3, 22, 24 and 25: a generator dies, stops, lags, loses a message or gets wrong bytes during a push.

The audit of the run checks that it is fed nothing before it holds the published version (I7), and the version of every
token (I5).
"""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.faults.ring import Fault, Line, Ring

pytestmark = pytest.mark.soak

DEADLINE_S = 1.0
SLACK_S = 4.0
PHASES = (
    "receive-announced",
    "receive-ready",
    "receive-met",
    "receive-landing",
    "receive-landed",
    "receive-reported",
    "swap",
    "swapped",
)
STOPPED = ("receive-announced", "receive-landing", "receive-landed")
ONE, OTHER = "generator-0", "generator-1"


@dataclass(frozen=True)
class Broken:
    """One push with a fault at generator-0."""

    version: int  # that it was to bring
    began: Line
    fault: Fault
    held: Line  # the first time that generator-0 holds this version, or a newer one


@dataclass
class Pushes:
    ring: Ring
    killed: dict[str, Broken] = field(default_factory=dict)  # by phase
    stopped: dict[str, Broken] = field(default_factory=dict)
    flipped: Broken | None = None
    lagging: Broken | None = None
    unheard: Broken | None = None


WAYS = {
    "gloo": ("weights.route=gloo",),
    "shared": ("weights.route=shared",),
    "delta": ("weights.route=gloo", "weights.delta_push=auto", "model.dtype=bfloat16", "actor.lr=1e-5"),
}


@pytest.fixture(scope="module", params=WAYS)
def pushes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pushes]:
    settings = (
        *WAYS[request.param],
        "run.total_train_steps=40",
        f"weights.timeout_s={DEADLINE_S}",
        "checkpoint.every_steps=0",
        "launch.max_restarts=20",  # lives of generator-0 that end in a push have sampled nothing
    )
    found = Pushes(Ring(tmp_path_factory.mktemp("pushes"), *settings))
    ring = found.ring
    ring.hold_learner(1)
    with ring.started():
        both_hold(ring, 1)
        for phase in PHASES:
            found.killed[phase] = one_push(ring, phase, "kill")
        for phase in STOPPED:
            found.stopped[phase] = one_push(ring, phase, "stop")
        found.flipped = one_push(ring, "receive-landing", "flip")
        found.lagging = one_push(ring, "swap", "lag")
        found.unheard = one_push(ring, "message-PushBegin", "drop")
        ring.hold_learner(None)
        ring.finish()
        assert ring.check_survived().n_terms == 1  # the learner had no part in it
        yield found


def both_hold(ring: Ring, version: int, *, after: float = 0.0) -> Line:
    """Wait until each generator holds the version. Returns the line of generator-0."""

    def held(who: str) -> list[Line]:
        lines = ring.lines("member", role="head", after=after, version=version, state="healthy")
        return [line for line in lines if line["name"].startswith(who)]

    ring.wait_until(lambda: bool(held(ONE) and held(OTHER)), f"both generators hold version {version}")
    return held(ONE)[0]


def one_push(ring: Ring, point: str, how: str) -> Broken:
    """The next version, whose push meets this fault; afterwards both hold it."""
    version = ring.lines("update", role="head")[-1]["version"] + 1
    now = time.monotonic()
    ring.set_failpoint(point, how, who=ONE)
    ring.hold_learner(version)
    fault = ring.wait_for_failpoint(point, after=now)
    published = ring.wait_for("publish", version=version)
    if how == "stop":
        ring.resume_process(fault.pid)
    held = both_hold(ring, version, after=fault.t - DEADLINE_S)
    began = next(line for line in ring.lines("push", role="head", version=version) if not line["catch_up"])
    assert published["t"] > began["t"]
    return Broken(version, began, fault, held)


def check_clock_went_on(ring: Ring, broken: Broken) -> None:
    """The version is published by its deadline with the members that hold it; the other one holds it later."""
    published = next(line for line in ring.lines("publish", role="head") if line["version"] == broken.version)
    assert published["t"] - broken.began["t"] < DEADLINE_S + SLACK_S
    assert published["members"] in (0, 1)


@pytest.mark.parametrize("phase", PHASES)
def test_row_03_kill_generator_in_each_phase_of_a_push(pushes: Pushes, phase: str) -> None:
    ring, broken = pushes.ring, pushes.killed[phase]
    assert broken.fault.name.startswith(ONE)
    assert broken.held["name"] == broken.fault.next
    check_clock_went_on(ring, broken)


@pytest.mark.parametrize("phase", STOPPED)
def test_row_03_stop_generator_in_a_push_until_after_its_deadline(pushes: Pushes, phase: str) -> None:
    """It recovers by itself, in the same incarnation."""
    ring, broken = pushes.ring, pushes.stopped[phase]
    assert broken.held["name"] == broken.fault.name
    check_clock_went_on(ring, broken)


def test_row_22_a_generator_that_lags_gets_no_leases_and_is_judged_by_its_version(pushes: Pushes) -> None:
    ring, broken = pushes.ring, pushes.lagging
    assert broken is not None
    check_clock_went_on(ring, broken)


def test_row_24_wrong_bytes_are_refused_by_their_hash(pushes: Pushes) -> None:
    """The receiver reports them: it is fenced, and a catch-up push delivers the right bytes."""
    ring, broken = pushes.ring, pushes.flipped
    assert broken is not None
    said = [x["error"] for x in ring.lines("push_broken", role="generator") if x["version"] == broken.version]
    assert len([error for error in said if "checksum mismatch in" in error]) == 1
    assert broken.held["name"] == broken.fault.name
    right = {x["digest"] for x in ring.lines("update", role="head", version=broken.version)}
    assert {x["digest"] for x in ring.lines("pushed", version=broken.version)} == right
    assert f"push of version {broken.version}: {broken.fault.name}: checksum mismatch in" in ring.output


def test_row_25_a_push_whose_announcement_was_lost_is_repeated(pushes: Pushes) -> None:
    ring, broken = pushes.ring, pushes.unheard
    assert broken is not None
    check_clock_went_on(ring, broken)


def test_row_25_a_lost_term_announcement_comes_with_the_next_push(tmp_path: Path) -> None:
    """It ends its samples of the lost versions and mixes no version of them into others."""
    ring = Ring(tmp_path, "run.total_train_steps=8")
    ring.hold_learner(3)
    with ring.started():
        ring.wait_for_version(3, f"{ONE}.0", f"{OTHER}.0")
        ring.wait_for("checkpoint", role="learner", step=2)  # it is written beside training
        ring.set_failpoint("message-Term", "drop", who=ONE)
        fault = ring.kill("learner-0")
        ring.hold_learner(None)
        ring.finish()
    ring.check_survived()
    (lost,) = ring.failpoint_hits("message-Term")
    assert lost.name == f"{ONE}.0"
    (term,) = [line for line in ring.lines("term", role="head") if line["t"] > fault.t]
    assert (term["term"], term["version"]) == (1, 2)
    mine = ring.lines("pushed", role="generator", rank=0, after=fault.t)
    assert mine[0]["version"] == 2  # what it held of version 3 is gone
    assert {line["term"] for line in mine} == {1}
    assert ring.lines("completion", role="generator", rank=0, after=mine[0]["t"])


def test_row_03_the_learner_dies_while_a_generator_copies_out_of_its_memory(tmp_path: Path) -> None:
    """The shared memory lasts until the generator learns of the death; then the next incarnation sends its weights."""
    ring = Ring(tmp_path, "run.total_train_steps=8", "weights.route=shared", "weights.timeout_s=20")
    ring.hold_learner(2)
    with ring.started():
        ring.wait_for_version(2, f"{ONE}.0", f"{OTHER}.0")
        now = time.monotonic()
        ring.set_failpoint("receive-landing", "lag", who=ONE)
        ring.hold_learner(3)
        halted = ring.wait_for_failpoint("receive-landing", after=now)
        memory = maps_weights(halted.pid)
        fault = ring.kill("learner-0")
        assert maps_weights(halted.pid) == memory != set()
        ring.wait_until(lambda: not memory & maps_weights(halted.pid), f"{ONE} lets go of the dead learner's memory")
        ring.hold_learner(None)
        ring.finish()
    ring.check_survived()
    mine = ring.lines("pushed", role="generator", rank=0, after=fault.t)
    assert {line["inc"] for line in mine} == {0}, f"{ONE} goes on in the same life"


def maps_weights(pid: int) -> set[str]:
    """Inodes of the memory that it copies weights out of."""
    rows = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return {row.split()[4] for row in rows if "memfd:areal-bus-weights" in row}
