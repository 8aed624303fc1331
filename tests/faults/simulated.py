"""Simulated rings for rows of the fault matrix: one fault at a time, a recorded story, configurable links."""

import random
from collections import Counter
from collections.abc import Callable
from types import UnionType
from typing import Any

from areal_bus import messages as m
from areal_bus.core.effects import End
from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Scenario
from areal_lab.staleness.simulator.world import World

CALM_S = 300.0
DONE = End(0, "done")


def scenario(seed: int = 1, policy: StalenessPolicy = StalenessPolicy.MASK, **changes: Any) -> Scenario:
    """A ring without faults: two generators, two rewards, no false detection of a death."""
    standard: dict[str, Any] = {
        "batch_size": 2, "eta": 1, "n_samples": 2, "total_steps": 8, "n_generators": 2, "n_rewards": 2,
        "calm_s": CALM_S,
    }  # fmt: skip
    return Scenario(seed, policy, **(standard | changes))


def play(one: Scenario, world_class: type[World] = World) -> tuple[Ring, ScheduleOutcome]:
    """Run it to its end, with all of its journal and its story."""
    ring = Ring(one, keeps_story=True, world_class=world_class)
    ring.records = []
    return ring, ring.run()


def survive(one: Scenario, world_class: type[World] = World, *, checks: tuple[str, ...] = ("I3", "I4", "I6")) -> Ring:
    """The ring ends, no invariant is broken, and the named ones were checked."""
    ring, outcome = play(one, world_class)
    assert not outcome.violations, f"seed {one.seed}, {one.policy}: {outcome.violations[0]}"
    assert outcome.end == DONE, f"seed {one.seed}, {one.policy}: {outcome.end}"
    assert all(ring.witness.n_checks[name] > 0 for name in checks)
    scored = Counter((x["uid"], x["sample"]) for x in lines(ring, Event.SCORED))
    assert max(scored.values()) == 1
    return ring


def lines(ring: Ring, event: Event, **wanted: Any) -> list[dict[str, Any]]:
    """Lines of the head's journal."""
    found = [record.fields for _, record in ring.records or () if record.event is event]
    return [line for line in found if all(line.get(key) == value for key, value in wanted.items())]


def when(ring: Ring, event: Event, **wanted: Any) -> float:
    """Virtual time of the first such line."""
    for at_s, record in ring.records or ():
        if record.event is event and all(record.fields.get(key) == value for key, value in wanted.items()):
            return at_s
    raise LookupError(f"no {event} with {wanted}")


def lost(ring: Ring, kind: type) -> list[Any]:
    """Messages of this kind that never arrived."""
    return [about for _, what, about in ring.world.story or () if isinstance(about, kind) and what.endswith(" lost")]


def arrived(ring: Ring, kind: type | UnionType) -> list[Any]:
    """Messages of this kind in order of processing, with repeats."""
    found = [(what, about) for _, what, about in ring.world.story or () if isinstance(about, kind)]
    return [about for what, about in found if not what.endswith((" lost", " is gone"))]


def key(message: Any) -> tuple[int, int, int]:
    return message.uid, message.attempt, message.sample


Judge = Callable[[str, str, m.Message, float], float | None]


def bent(judge: Judge) -> type[World]:
    """A world whose links ask `judge(sender, to, message, now)` for the delay in seconds; None drops the message.

    What is later than others stays in order behind them only if `judge` makes it so.
    """

    class Bent(World):
        def send(self, sender: str, to: str, message: m.Message) -> None:
            late_s = judge(sender, to, message, self.now)
            if late_s is None:
                self.tell(f"{sender} -> {to} lost", message)
            elif late_s > 0:
                self.at(self.now + late_s, super().send, sender, to, message)
            else:
                super().send(sender, to, message)

    return Bent


def shuffled(seed: int, most_s: float) -> Judge:
    """Repeated messages arrive in any order."""
    rng = random.Random(seed)
    kinds = (m.Trajectory, m.Scored, m.Sampled, m.Ack, m.PushBegin, m.PushDone, m.Heartbeat, m.HeadHeartbeat)
    return lambda sender, to, message, now: rng.uniform(0, most_s) if isinstance(message, kinds) else 0.0


def ends_well(one: Scenario, *, failing: int = 0) -> tuple[Ring, ScheduleOutcome]:
    """The ring ends and no invariant is broken; only the first so many generators are evicted, and none is paused
    but these.
    """
    ring, outcome = play(one)
    assert not outcome.violations, f"seed {one.seed}: {outcome.violations[0]}"
    assert outcome.end == DONE, f"seed {one.seed}: {outcome.end}"
    bad = tuple(f"generator-{index}." for index in range(failing))
    hurt = [x["name"] for x in lines(ring, Event.MEMBER) if x["state"] == "left" or x["why"].startswith("paused for")]
    assert all(name.startswith(bad) for name in hurt), f"seed {one.seed}: {hurt}"
    return ring, outcome
