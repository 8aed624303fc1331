"""Row 48: rewards die while they compare groups, in seeded rings; the audit of each."""

from collections import Counter
from pathlib import Path

import pytest

from tests.areal_bus.core.transitions.test_group_rewards import compared
from tests.tools.audit.test_simulated import Recorded, journal
from tools.audit.audit import audit
from tools.run import Run


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 120, 30))
def test_row_48_groups_are_compared_whole_and_once_when_rewards_die(first: int, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, first + 30):
        scenario = compared(seed)
        ring = Recorded(scenario)
        outcome = ring.run()
        assert not outcome.violations, (seed, outcome.violations[:2])
        found = audit(Run(journal(tmp_path, scenario, ring)))
        assert not found.findings.first, (seed, found.findings.first)
        seen.update(str(record.event) for _, record in ring.records or ())
    assert seen["compare"] > seen["compared"] > seen["ready"] > 100, seen  # some were asked again, some verdicts failed
