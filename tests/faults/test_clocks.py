"""Row 37: the wall clock may jump (NTP, by hand). Decisions use monotonic time only."""

import ast
import itertools
import json
import random
import time
from pathlib import Path

import pytest

from areal_bus.core.events import Event
from areal_bus.storage.journal import Journal
from tests.faults.simulated import lines, scenario
from tests.faults.wired import WiredRing

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for package in ("areal_bus", "actors", "launch") for path in (ROOT / package).rglob("*.py"))
WALL = {  # names of the standard library that read or show wall time
    "time": {"time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "mktime"},
    "datetime": {"now", "today", "utcnow", "fromtimestamp"},
    "date": {"today", "fromtimestamp"},
}
READERS = {
    "areal_bus/storage/journal.py": ["time.time"],  # `wall` of every line, for people and to order files by
    "actors/endpoint/openai_api.py": ["time.time"],  # `created` of an answer, as clients expect it
    "actors/learner/checkpoint/checkpoint_manager.py": ["time.time"],  # age of a file; a jump moves one checkpoint
    "actors/engines/servers/watch_parent.py": ["time.time"],  # compared with times of files that a server left
    "launch/checks/machine_checks.py": ["time.time"],  # compared with the clock of the file system, for people
    "launch/run/prepare.py": ["date.today"],  # the date that a chat template prints, once a run
}
PURE = [ROOT / "areal_bus" / "messages.py", *sorted((ROOT / "areal_bus" / "core").glob("*.py"))]


def wall_reads(source: str) -> list[str]:
    """Where a source reads the wall clock. Only a source with one of the names is parsed."""
    names = ["from time import", *(f"{owner}.{name}" for owner, known in WALL.items() for name in known)]
    if not any(name in source for name in names):
        return []
    tree = ast.parse(source)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = node.value.id
            found += [f"{owner}.{node.attr}"] if node.attr in WALL.get(owner, set()) else []
        elif isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"from time import {x.name}" for x in node.names if x.name in WALL["time"]]
    return found


def test_row_37_no_source_decides_by_the_wall_clock() -> None:
    reads = {str(path.relative_to(ROOT)): wall_reads(path.read_text()) for path in SOURCES}
    assert {name: found for name, found in reads.items() if found} == READERS


@pytest.mark.parametrize("source", ["time.time()", "datetime.now()", "from time import time", "time.localtime()"])
def test_row_37_a_read_of_the_wall_clock_is_found(source: str) -> None:
    assert wall_reads(source)


def test_row_37_pure_parts_know_no_clock_at_all() -> None:
    for path in PURE:
        tree = ast.parse(path.read_text())
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert not imported & {"time", "datetime", "threading", "socket"}, path.name


def test_row_37_leases_heartbeats_and_deadlines_do_not_notice_a_clock_that_jumps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A ring over real sockets while the wall clock is an hour, a day or a year off, another way at every look."""
    rng, real = random.Random(1), time.time
    monkeypatch.setattr(time, "time", lambda: real() + rng.choice((-1, 1)) * rng.choice((0.0, 3600.0, 86400.0, 3e7)))
    journal = Journal(tmp_path, role="head", index=0, incarnation=0)
    with WiredRing(scenario(total_steps=4, silent_s=60.0, patience_s=400.0, calm_s=0.0)) as ring:
        ring.survive()
        for _, record in ring.records or ():
            journal.write(record.event, **record.fields)
        assert not lines(ring, Event.MEMBER, state="dead")
        assert {line["attempt"] for line in lines(ring, Event.LEASE)} == {0}
    journal.close()
    written = [json.loads(line) for line in journal.path.read_text().splitlines()]
    assert all(one["t"] <= other["t"] for one, other in itertools.pairwise(written))
    assert not all(one["wall"] <= other["wall"] for one, other in itertools.pairwise(written))  # it did jump
