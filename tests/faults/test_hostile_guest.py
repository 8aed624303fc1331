"""Row 46: guests with the key of join.json send all that they must not, in a real ring of three generators.

The job runs as a user may run it: under `areal-bus run`, in a Latin-1 locale, with standard output closed.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any

import pytest

from areal_bus import messages as m
from areal_bus.transport.bus import Bus
from areal_bus.transport.curve import KeyPair, Keyring
from areal_bus.transport.rejections import STRIKES
from tests.areal_bus.transport.test_authorization import OVER_A_LIMIT, over
from tests.faults.ring import SPAWN, Ring
from tests.faults.ring import replace as write
from tests.faults.test_guests import join
from tests.faults.test_world import SCRIPT, latin1
from tests.launch.test_bootstrap import MPI

pytestmark = pytest.mark.soak

STEPS, B, N = 40, 4, 2  # updates; prompts of a batch and samples of a prompt, of tests/faults/ring.toml
GUEST = "generator-3"
EACH = STRIKES - 3  # messages over a limit of one visitor: after ten its others are not read
AHEAD = 8  # prompts to come of which garbage is sent
SETTINGS = (
    f"run.total_train_steps={STEPS}",
    "rollout.max_head_offpolicyness=1",
    "bus.transport=tcp",
    "bus.curve=on",
    *SPAWN,
)


class UserRing(Ring):
    """Started by `areal-bus run`."""

    def _command_lines(self, job: list[str]) -> list[tuple[list[str], dict[str, str]]]:
        config, overrides = job[3], job[4:]
        words = [str(SCRIPT), "run", config, "-np", str(self.ranks), *overrides]
        return [(["sh", "-c", '"$@" >&-', "sh", *words], MPI | latin1(self.folder / "locale"))]


def train(ring: Ring, visit: Callable[[int], object] = lambda step: None) -> None:
    """All steps. The learner takes a batch when every prompt that may be sampled is ready, so that timing does not
    decide which prompts a batch has.
    """
    for step in range(STEPS):
        visit(step)
        until_ready(ring, B * min(step + 2, STEPS))
        ring.hold_learner(step + 1 if step + 1 < STEPS else None)
    ring.finish(timeout_s=300)


def until_ready(ring: Ring, n: int) -> None:
    ring.wait_until(lambda: set(range(n)) <= ready(ring), f"prompts below {n} are ready", timeout_s=300)


def ready(ring: Ring) -> set[int]:
    return {line["uid"] for line in ring.lines("ready", role="head")}


class Visitors:
    """One guest after the other, each with a few of the messages over a limit, floods and garbage."""

    def __init__(self, ring: Ring) -> None:
        self.ring, self.n = ring, 0
        self._claims = cycle(OVER_A_LIMIT[at : at + EACH] for at in range(0, len(OVER_A_LIMIT), EACH))

    def visit(self) -> None:
        fields = json.loads((self.ring.run / "join.json").read_text(encoding="utf-8"))
        self.n += 1
        name = f"generator-{70 + self.n}.0"
        keys = Keyring(KeyPair(fields["public_key"], fields["secret_key"]), fields["keys"])
        bus = Bus(name, job=fields["job"], keys=keys)
        try:
            bus.connect("head", fields["head"])
            bus.send("head", m.Join(name, "generator", 70 + self.n, 0, "", 1, "h" * 200))
            bus.send("head", m.Ready(2**62))
            self._flood(bus, name, self._rewards(bus))
        finally:
            bus.close(2.0)

    def _rewards(self, bus: Bus) -> list[str]:
        while not isinstance((received := bus.receive(30.0) or ("", m.Stop("nothing came")))[1], m.PeerList):
            assert not isinstance(received[1], m.Stop)
        peers = received[1]
        rewards = [pair for pair in zip(peers.names, peers.endpoints, strict=True) if pair[0].startswith("reward-")]
        for reward, endpoint in rewards:
            bus.connect(reward, endpoint)
        return [reward for reward, _ in rewards]

    def _flood(self, bus: Bus, name: str, rewards: list[str]) -> None:
        done = max(ready(self.ring), default=0)
        for uid in range(done, done + AHEAD):
            garbage = over(m.Trajectory, uid=uid, generator=name, segments=[[1, 3]], spans=[[0, 3]], ids=bytes(16),
                           logps=bytes(12))  # fmt: skip
            for reward in rewards:
                bus.send(reward, garbage)
            bus.send("head", over(m.SampleFailed, uid=uid, reason="lost_timeline"))
            bus.send("head", over(m.Sampled, uid=uid))
        bus.send_all(("head", m.Heartbeat(n, 0, f"note {n}")) for n in range(3000))
        for again in range(1, 1500):
            bus.send("head", m.Join(name, "generator", 70 + self.n, 0, "", 1, "", again=again))
        for claim in next(self._claims):
            if isinstance(claim, m.Trajectory):
                bus.send(rewards[0], replace(claim, generator=name))
            else:
                bus.send("head", claim)


@dataclass(frozen=True)
class Visited:
    alone: Ring
    ring: Ring
    n_visits: int
    memory: int  # bytes of the head at the end


@pytest.fixture(scope="module")
def visited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Visited]:
    rings = [UserRing(tmp_path_factory.mktemp(name), *SETTINGS, ranks=5) for name in ("alone", "visited")]
    for ring in rings:
        (ring.folder / "locale").mkdir()
        ring.hold_learner(0)
    alone, ring = rings
    with alone.started():
        train(alone)
    write(ring.folder / "hostile", GUEST)
    write(ring.folder / "lease_s", "1")
    visitors, memory, guests = Visitors(ring), 0, []

    def visit(step: int) -> None:
        nonlocal memory
        if step == 1:
            guests.append(join(ring, "--join", str(ring.run)))
            ring.wait_for("member", name=f"{GUEST}.0", state="healthy")
        elif step % 3 == 0 and step:
            visitors.visit()
        memory = ring.memory("head-0") if step else 0

    with ring.started():
        train(ring, visit)
        for guest in guests:
            guest.wait(60)
        yield Visited(alone, ring, visitors.n, memory)


def trained(ring: Ring) -> list[tuple[Any, ...]]:
    return sorted((x["step"], x["uid"], x["sample"]) for x in ring.lines("trajectory", role="head"))


def test_row_46_the_run_ends_with_the_same_batches_as_without_its_guests(visited: Visited) -> None:
    histories = [ring.check_survived() for ring in (visited.alone, visited.ring)]
    assert [history.n_terms for history in histories] == [1, 1]
    assert {line["reason"] for line in visited.ring.lines("refund", role="head")} <= {"end_of_run"}
    assert trained(visited.ring) == trained(visited.alone)
    assert len(trained(visited.ring)) == STEPS * B * N


def test_row_46_the_actors_of_the_job_live_through_their_guests(visited: Visited) -> None:
    ring = visited.ring
    assert not [line for line in ring.lines("joined", role="head") if not line["name"].endswith(".0")
                and line["name"].partition(".")[0] != GUEST]  # fmt: skip
    dead = {line["name"] for line in ring.lines("member", role="head", state="dead")}
    assert {int(name.partition("-")[2].partition(".")[0]) >= 3 for name in dead} <= {True}
    assert visited.memory < 300 << 20


def test_row_46_all_claims_were_made_and_refused(visited: Visited) -> None:
    assert visited.n_visits * EACH >= len(OVER_A_LIMIT)
    refused = visited.ring.lines("refused", role="head")
    doors = {line["reason"] for line in refused if line["what"] == "bytes"}
    assert "limit" in doors
    whats = {line["what"] for line in refused if line["sender"].startswith(GUEST)}
    assert {"Join", "SampleFailed", "Sampled", "Partial", "PushDone", "Failure"} <= whats
    failed = visited.ring.lines("unsampled", role="head")
    assert {line["holder"].partition(".")[0] for line in failed} == {GUEST}
    assert any(line["error"].startswith("timed out") for line in failed)
    assert any("exceeds a limit" in line["error"] for line in failed)


def test_row_46_lines_about_guests_are_bounded(visited: Visited) -> None:
    lines = [x for x in visited.ring.lines(role="head") if str(x.get("sender", x.get("name", ""))).startswith(GUEST)]
    assert len(lines) < 5000
