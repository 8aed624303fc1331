"""Schedules one after the other; knows nothing of what is in them."""

import gc
from collections.abc import Iterable, Iterator

from areal_bus.simulation.ring import Outcome, Ring
from areal_bus.simulation.scenario import Scenario

SWEEP = 50  # schedules between two collections


def outcomes(plans: Iterable[Scenario]) -> Iterator[tuple[Ring, Outcome]]:
    """Run them. A ring is garbage as a whole: looking for some while it runs costs a seventh of the time."""
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()  # what is there is none
    try:
        for i, plan in enumerate(plans):
            ring = Ring(plan)
            yield ring, ring.run()
            if i % SWEEP == SWEEP - 1:
                gc.collect()
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()
