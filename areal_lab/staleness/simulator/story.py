"""Runs schedules of the simulator, and prints the events of one schedule."""

import dataclasses
import gc
from collections.abc import Iterable, Iterator

from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Scenario

SWEEP = 50  # schedules between two collections


def outcomes(plans: Iterable[Scenario]) -> Iterator[tuple[Ring, ScheduleOutcome]]:
    """Run scenarios. A ring becomes garbage as a whole: collecting while it runs costs a seventh of the time."""
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()  # objects that exist now are no garbage
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


CLOCKS = {"batch", "update", "publish", "push", "push_broken", "member", "joined"}
QUIET = {"ids", "logps", "segments", "prompt_text", "text", "row", "seconds", "score_s", "note", "progress", "pid"}


def tell(scenario: Scenario, uid: int | None = None) -> tuple[ScheduleOutcome, list[str]]:
    """Run the scenario again and return its lines; with `uid` those of that prompt and of the clocks only."""
    ring = Ring(scenario, keeps_story=True)
    outcome = ring.run()
    return outcome, [*_setting(scenario), *_lines(ring, uid)]


def _setting(scenario: Scenario) -> Iterator[str]:
    fields = dataclasses.fields(scenario)
    plain = [f"{field.name} {getattr(scenario, field.name)}" for field in fields if field.name != "faults"]
    yield "; ".join(plain)
    for fault in scenario.faults:
        yield f"fault: {fault.kind} of {fault.role}-{fault.index} at {fault.at_s:.2f} s for {fault.for_s:.2f} s"


def _lines(ring: Ring, uid: int | None) -> Iterator[str]:
    for at_s, what, about in ring.world.story or ():
        fields = about if isinstance(about, dict) else _fields(about)
        is_wanted = about is None or what in CLOCKS or (bool(fields.get("uid") == uid) and not fields.get("evaluation"))
        if uid is None or is_wanted:
            name = "" if about is None or isinstance(about, dict) else f" {type(about).__name__}"
            shown = ", ".join(f"{key} {value}" for key, value in fields.items() if key not in QUIET and value != "")
            yield f"{at_s:9.2f}  {what}{name}{': ' + shown if shown else ''}"


def _fields(message: object) -> dict[str, object]:
    if not dataclasses.is_dataclass(message):
        return {}
    return {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
