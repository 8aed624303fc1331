"""tools.audit over simulated schedules with all kinds of faults: the journals of the production head are clean."""

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.effects import End, Record
from areal_bus.core.events import Event
from areal_bus.messages import Role
from areal_lab.staleness.simulator.ring import Ring, ScheduleOutcome
from areal_lab.staleness.simulator.scenario import Scenario, draw
from tools.audit.audit import Audit, audit
from tools.run import Run


class Recorded(Ring):
    """A ring whose records tell where each life of the head begins, and which end of one was orderly."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__(scenario)
        self.records = [(0.0, Record(Event.START, {}))]

    def _tell(self, event: Event, **fields: Any) -> None:
        if self.records is not None:
            self.records.append((self.world.now, Record(event, fields)))

    def _tick(self, n_heads: int) -> None:
        """A head that runs labels its time, one that is stopped does not."""
        self._tell(Event.SPANS)
        super()._tick(n_heads)

    def _start_head(self) -> None:
        super()._start_head()
        self._tell(Event.START)

    def _on_end(self, end: End) -> None:
        self._tell(Event.END, code=end.code, reason=end.sentence)
        super()._on_end(end)


def lives(ring: Recorded) -> list[list[tuple[float, Record]]]:
    """The records of each life of the head."""
    found: list[list[tuple[float, Record]]] = []
    for now, record in ring.records or ():
        if record.event is Event.START:
            found.append([])
        found[-1].append((now, record))
    return found


def lines(life: list[tuple[float, Record]]) -> list[dict[str, Any]]:
    """As its shell writes them: numbered, with the term that it knows of, every second labelled."""
    began, until = life[0][0], life[-1][0]
    at = len(life) - (life[-1][1].event is Event.END)
    out: list[dict[str, Any]] = []
    term, labelled = 0, began
    for now, record in [*life[:at], (until, Record(Event.SPANS, {})), *life[at:]]:
        if record.event is Event.TERM:
            term = record.fields["term"]
        line: dict[str, Any] = {"t": now, "wall": now, "term": term, "role": "head", "rank": 0, "event": record.event}
        if record.event is Event.SPANS:
            line["s_decide"], labelled = now - labelled, now
        elif record.event is Event.END:
            line["wall_s"] = until - began
        out.append({**line, **record.fields})
    return [{**line, "seq": seq} for seq, line in enumerate(out)]


def journal(folder: Path, scenario: Scenario, ring: Recorded) -> Path:
    """The files of the heads, one for each life."""
    config: dict[str, Any] = {
        "data": {
            "batch_size": scenario.batch_size,
            "max_refill": scenario.max_refill,
            "source": [{"name": one.name, "weight": one.weight} for one in scenario.sources],
            "curriculum": None if scenario.window is None else asdict(scenario.window),
        },
        "rollout": {"max_head_offpolicyness": scenario.eta, "staleness_policy": str(scenario.policy)},
        "gconfig": {"n_samples": scenario.n_samples},
        "weights": {"timeout_s": scenario.push_timeout_s},
        "bus": {"silent_s": scenario.silent_s},
        "reward": {
            "on_timeout": "refund" if scenario.on_timeout is None else scenario.on_timeout,
            "on_error": "refund" if scenario.on_error is None else scenario.on_error,
            "partial_groups": scenario.partial_groups,
            "group": "ranks:ranks" if scenario.compares else "",
        },
    }
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    for old in (folder / "journal").glob("*.jsonl"):
        old.unlink()
    for inc, life in enumerate(lives(ring)):
        text = "".join(json.dumps({**line, "inc": inc}, separators=(",", ":")) + "\n" for line in lines(life))
        (folder / "journal" / f"head-0.{inc}.jsonl").write_text(text)
    return folder


def goes_back(scenario: Scenario) -> bool:
    """Whether a learner or the head dies, which begins a term."""
    return any(
        fault.role in (Role.LEARNER, Role.HEAD) and fault.kind not in ("stop", "cut") for fault in scenario.faults
    )


def audited(folder: Path, seed: int) -> tuple[Audit, ScheduleOutcome]:
    scenario = draw(seed)
    ring = Recorded(scenario)
    outcome = ring.run()
    return audit(Run(journal(folder, scenario, ring))), outcome


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_the_heads_journal_is_clean_under_every_policy_and_fault(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        found, outcome = audited(tmp_path, seed)
        assert not found.findings.first, (seed, outcome.end, found.findings.first)
        assert not outcome.violations


@pytest.mark.slow
def test_journals_of_heads_over_several_terms_are_clean(tmp_path: Path) -> None:
    seeds = [seed for seed in range(200, 2000) if goes_back(draw(seed))][:120]
    seen: Counter[str] = Counter()
    for seed in seeds:
        found, outcome = audited(tmp_path, seed)
        assert not found.findings.first, (seed, outcome.end, found.findings.first)
        assert found.head is not None
        assert not found.head.unseen
        beginnings = found.head.terms.all
        seen["later terms"] += len(beginnings) - 1
        seen["later heads"] += found.head.lives - 1
        seen["undone batches"] += bool(found.head.undone.trajectories)
        seen["open again"] += any(beginning.open for beginning in beginnings)
        seen["verdicts kept"] += any(kept for beginning in beginnings for kept in beginning.open.values())
    enough = {"later terms": 80, "later heads": 40, "undone batches": 12, "open again": 5, "verdicts kept": 2}
    assert all(seen[name] >= n for name, n in enough.items()), seen
