"""tools.audit over simulated schedules with faults of every kind: what the head of today writes down is clean."""

import json
from pathlib import Path
from typing import Any

import pytest

from areal_bus.simulation.ring import Outcome, Ring
from areal_bus.simulation.scenario import Scenario, draw
from tools.audit.audit import Audit, audit
from tools.run import Run


def journal(folder: Path, scenario: Scenario, ring: Ring, outcome: Outcome) -> Path:
    """The head's file as its shell would have written it."""
    config: dict[str, Any] = {
        "data": {"batch_size": scenario.batch_size},
        "rollout": {"max_head_offpolicyness": scenario.eta, "staleness_policy": str(scenario.policy)},
        "gconfig": {"n_samples": scenario.n_samples},
        "weights": {"timeout_s": scenario.push_timeout_s},
        "bus": {"silent_s": scenario.silent_s},
    }
    (folder / "journal").mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    t = outcome.seconds
    lines = [(0.0, {"event": "start"})]
    lines += [(now, {"event": str(record.event), **record.fields}) for now, record in ring.records or ()]
    lines.append((t, {"event": "spans", "s_decide": t}))
    if outcome.end is not None:
        lines.append((t, {"event": "end", "wall_s": t, "code": outcome.end.code, "reason": outcome.end.sentence}))
    who = {"role": "head", "rank": 0, "inc": 0, "term": 0}
    texts = [json.dumps({**line, "t": now, "wall": now, **who, "seq": i}) for i, (now, line) in enumerate(lines)]
    (folder / "journal" / "head-0.0.jsonl").write_text("\n".join(texts) + "\n")
    return folder


def audited(folder: Path, seed: int) -> tuple[Audit, Outcome]:
    scenario = draw(seed)
    ring = Ring(scenario)
    ring.records = []
    outcome = ring.run()
    return audit(Run(journal(folder, scenario, ring, outcome))), outcome


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_what_the_head_writes_is_clean_under_every_policy_and_fault(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        found, outcome = audited(tmp_path, seed)
        assert not found.findings.first, (seed, outcome.end, found.findings.first)
        assert not outcome.violations
