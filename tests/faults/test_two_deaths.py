"""Rows 2 and 3 on a short ring: a generator dies during a rollout, another one during the assembly of a push."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.ring import Blow, Ring
from tests.faults.test_deaths import REISSUED_S, kill_in_mid_rollout, own

DEADLINE_S = 60.0  # of a push: nobody waits for it
AT_ONCE_S = 20.0  # a loaded machine takes its time


@dataclass(frozen=True)
class Deaths:
    ring: Ring
    sampling: Blow  # generator-0
    assembling: Blow  # generator-1


@pytest.fixture(scope="module")
def deaths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deaths]:
    folder: Path = tmp_path_factory.mktemp("two_deaths")
    changes = (f"weights.timeout_s={DEADLINE_S}", "checkpoint.every_steps=0", "weights.route=gloo")  # which meets
    ring = Ring(folder, "run.total_train_steps=6", *changes)
    ring.hold(1)
    with ring.started():
        ring.until_held(1, "generator-0.0", "generator-1.0")
        sampling = kill_in_mid_rollout(ring, "generator-0")
        ring.until("lease", after=sampling.t, holder="generator-1.0")
        ring.slow(None)
        ring.until("member", name=sampling.next, state="healthy")
        ring.arm("receive-ready", "kill", who="generator-1")  # it has come, and the others wait for it to connect
        ring.hold(5)
        assembling = ring.struck("receive-ready")
        ring.until("member", name=assembling.next, state="healthy")
        ring.hold(None)
        ring.finish()
        ring.check_survived()
        yield Deaths(ring, sampling, assembling)


@pytest.mark.slow
def test_row_02_what_a_generator_had_begun_goes_to_another_one(deaths: Deaths) -> None:
    ring, blow = deaths.ring, deaths.sampling
    begun = {(x["uid"], x["sample"]) for x in own(ring, blow, "request")}
    lost = {uid for uid, _ in begun - {(x["uid"], x["sample"]) for x in own(ring, blow, "completion")}}
    assert lost
    for uid in lost:
        again = next(x for x in ring.lines("lease", role="head", uid=uid) if x["t"] > blow.t)
        assert again["holder"] == "generator-1.0"
        assert again["t"] - blow.t < REISSUED_S


@pytest.mark.slow
def test_row_03_a_push_whose_member_dies_while_it_assembles_waits_for_no_deadline(deaths: Deaths) -> None:
    ring, blow = deaths.ring, deaths.assembling
    began = [line for line in ring.lines("push", role="head") if line["t"] < blow.t][-1]
    gave_up = next(x for x in ring.lines("push_broken", role="head") if x["name"] == "learner-0.0" and x["t"] > blow.t)
    assert gave_up["push"] == began["push"]
    assert gave_up["t"] - blow.t < AT_ONCE_S < DEADLINE_S
    assert "cancelled here" in gave_up["error"]
    published = next(x for x in ring.lines("publish", role="head") if x["t"] > blow.t)
    assert published["t"] - blow.t < AT_ONCE_S
    other = ring.lines("member", role="head", name=deaths.sampling.next, state="healthy", after=gave_up["t"])
    assert other[0]["t"] - blow.t < AT_ONCE_S, "the other one is caught up at once"
