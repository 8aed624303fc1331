"""Row 3: a live generator fails every push of its group, for ever or for a while.

Many seeds in the simulator, and one real job.
"""

from typing import Any

import pytest

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario
from tests.faults.simulated import ends_well, lines, play, scenario

SEEDS = range(20)  # of each of the four ways
EVER = 1e9
WAYS = [(how, until_s) for how in ("said", "silent") for until_s in (EVER, 60.0)]


def refusing(seed: int, how: str, until_s: float, **changes: Any) -> Scenario:
    """Generator 0 refuses from the start, or from some moment on; three generators, every policy in turn."""
    policy = list(StalenessPolicy)[seed % 4]
    standard: dict[str, Any] = {
        "n_generators": 3, "total_steps": 8, "eta": 1 + seed % 3, "refuses": how, "refuses_until_s": until_s,
        "refuses_from_s": 20.0 * (seed % 2), "calm_s": 60.0 if until_s < EVER else 0.0,
        "joins_s": (0.0, 0.0, 30.0 * (seed % 3)), "update_s": 3.0,
    }  # fmt: skip
    return scenario(seed, policy, **(standard | changes))


@pytest.mark.parametrize("how", ["said", "silent"])
def test_row_03_two_of_nine_that_refuse_every_push_hurt_themselves_alone(how: str) -> None:
    """Of so many each half is pushed to first."""
    for seed in range(15):
        one = refusing(seed, how, EVER, n_generators=9, n_refusing=2, joins_s=(0.0,) * 9, total_steps=12)
        ends_well(one, failing=2)


@pytest.mark.slow
@pytest.mark.parametrize(("how", "until_s"), WAYS)
def test_row_03_a_generator_that_refuses_every_push_hurts_itself_alone(how: str, until_s: float) -> None:
    n_dismissed = 0
    for seed in SEEDS:
        ring, _ = ends_well(refusing(seed, how, until_s), failing=1)
        n_dismissed += len(lines(ring, Event.MEMBER, state="left"))
    assert n_dismissed > 0 or until_s < EVER


@pytest.mark.slow
@pytest.mark.parametrize(("how", "most"), [("said", 1.3), ("silent", 3.0)])
def test_row_03_at_eta_0_shares_are_dealt_among_those_that_complete_their_pushes(how: str, most: float) -> None:
    """From the start, or from some moment on: at most so many times as long as without the bad one."""
    for seed in range(24):
        _, outcome = ends_well(refusing(seed, how, EVER, eta=0), failing=1)
        well_s = Ring(refusing(seed, "", EVER, eta=0)).run().seconds
        assert outcome.seconds <= most * well_s, f"seed {seed}: {outcome.seconds:.0f} s, without it {well_s:.0f} s"


@pytest.mark.parametrize("how", ["said", "silent"])
def test_row_03_at_eta_0_a_ring_goes_on_with_the_only_one_that_completes_pushes(how: str) -> None:
    for seed in range(15):
        ends_well(refusing(seed, how, EVER, eta=0, n_generators=7, n_refusing=6, joins_s=(0.0,) * 7), failing=6)


@pytest.mark.parametrize("how", ["said", "silent"])
def test_row_03_the_job_ends_when_every_generator_refuses_every_push(how: str) -> None:
    """After as many pushes as each may miss, with the last error."""
    for seed in SEEDS:
        one = refusing(seed, how, EVER, n_refusing=3, joins_s=(0.0, 0.0, 0.0), refuses_from_s=0.0)
        ring, outcome = play(one)
        assert outcome.end is not None, f"seed {seed}: {outcome.violations}"
        assert outcome.end.code == 1
        assert outcome.end.sentence.startswith("no generator completes a push: each missed 5 pushes of its own")
        n_pushes = len(lines(ring, Event.PUSH))
        assert n_pushes <= 5 * 3 + 10, f"seed {seed}: {n_pushes}"


def test_row_03_a_generator_that_refused_for_a_while_is_fed_again() -> None:
    for seed in range(20):
        ring, _ = play(refusing(seed, "said", 60.0, total_steps=20))
        story = [x for x in ring.world.story or () if x[1].startswith("head -> generator-0.") and x[0] > 60.0]
        assert min(at_s for at_s, _, about in story if isinstance(about, m.Prompt)) < 100.0, f"seed {seed}"
