"""The simulator: a seed determines a schedule, a schedule can be printed, and all announced faults occur."""

import hashlib
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from areal_bus import messages as m
from areal_bus.core.effects import End
from areal_lab.staleness.simulator.scenario import ScenarioLengths, Tail, draw
from areal_lab.staleness.simulator.story import tell
from areal_lab.staleness.simulator.world import World

ROOT = Path(__file__).parents[3]
FINGERPRINT = """
import hashlib
from areal_lab.staleness.simulator.scenario import draw
from areal_lab.staleness.simulator.story import tell
print(hashlib.sha256(repr([tell(draw(seed)) for seed in range(20)]).encode()).hexdigest())
"""


def test_a_seed_replays_exactly_in_another_process() -> None:
    here = hashlib.sha256(repr([tell(draw(seed)) for seed in range(20)]).encode()).hexdigest()
    environment = os.environ | {"PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", FINGERPRINT], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == here


def test_the_story_of_a_prompt_names_its_steps_and_no_other_prompt() -> None:
    outcome, lines = tell(draw(8), 2)
    assert outcome.end == End(0, "done")
    assert any("admit: uid 2" in line for line in lines)
    assert any("Scored" in line and "uid 2" in line for line in lines)
    assert any("publish: version" in line for line in lines)
    assert not any("uid 1," in line for line in lines)


class Recorder:
    def __init__(self) -> None:
        self.got: list[m.Message] = []

    def receive(self, sender: str, message: m.Message) -> None:
        self.got.append(message)


def world_of(**changes: float) -> tuple[World, Recorder]:
    settings = {"link_s": 1.0, "p_lost": 0.0, "p_twice": 0.0, "calm_s": 1e9} | changes
    world = World(random.Random(1), keeps_story=True, **settings)  # type: ignore[arg-type]
    world.nodes["b"] = recorder = Recorder()
    return world, recorder


def drain(world: World, n: int = 10_000) -> None:
    while world._events and n:
        world.step()
        n -= 1


def beat(number: int) -> m.Heartbeat:
    return m.Heartbeat(number, None, "")


def test_simulated_links_lose_duplicate_and_reorder_heartbeats() -> None:
    world, recorder = world_of(p_lost=0.3, p_twice=0.3)
    for i in range(200):
        world.send("a", "b", beat(i))
    drain(world)
    numbers = [message.progress for message in recorder.got]  # type: ignore[union-attr]
    assert 100 < len(set(numbers)) < 180
    assert len(numbers) > len(set(numbers)) + 20
    assert numbers != sorted(numbers)
    calm, recorder = world_of(p_lost=0.9, p_twice=0.9, calm_s=0.0)
    for i in range(50):
        calm.send("a", "b", beat(i))
    drain(calm)
    assert len(recorder.got) == 50  # nothing is lost after calm


def test_links_keep_the_order_of_everything_else_and_lose_none_of_it() -> None:
    world, recorder = world_of(p_lost=0.3, p_twice=0.3)
    world.cut("b", 50.0)
    for i in range(200):
        world.send("a", "b", m.BatchRequest(i))
    drain(world)
    assert [message.step for message in recorder.got] == list(range(200))  # type: ignore[union-attr]
    assert world.now >= 50.0


def test_a_stopped_process_receives_all_messages_when_continued_and_a_crashed_one_none() -> None:
    world, recorder = world_of()
    fired: list[float] = []
    world.stop("b", 30.0)
    world.timer("b", 5.0, lambda: fired.append(world.now))
    world.send("a", "b", m.BatchRequest(0))
    drain(world)
    assert fired == [30.0]
    assert len(recorder.got) == 1
    world.timer("b", 5.0, lambda: fired.append(world.now))
    world.send("a", "b", m.BatchRequest(1))
    world.crash("b")
    drain(world)
    assert fired == [30.0]
    assert len(recorder.got) == 1


def test_messages_unread_by_a_stopped_process_do_not_reach_its_next_incarnation() -> None:
    world, recorder = world_of()
    world.stop("b", 30.0)
    world.send("a", "b", m.BatchRequest(0))
    world.at(10.0, world.crash, "b")
    world.at(11.0, world.nodes.__setitem__, "b", recorder)
    world.at(12.0, world.send, "a", "b", m.BatchRequest(1))
    drain(world)
    assert [message.step for message in recorder.got] == [1]  # type: ignore[union-attr]
    assert world.now < 30.0 + 1.0


@pytest.mark.parametrize("tail", Tail)
def test_lengths_stay_between_one_and_the_cap(tail: Tail) -> None:
    rng = random.Random(3)
    drawn = [ScenarioLengths(tail, 4.0, 1.2, 50).draw(rng) for _ in range(2000)]
    assert min(drawn) >= 1
    assert max(drawn) <= 50
    assert len(set(drawn)) > 5
