"""areal_lab.staleness and the bench `gate`: figures and exit codes."""

import pytest

from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.transitions import scheduler
from areal_bus.errors import ConfigError
from areal_lab.staleness import __main__ as command
from areal_lab.staleness import policy_table, soak
from benchmarks.gate import bench as gate


def test_a_soak_reports_schedules_events_and_violations(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["soak", "--schedules", "40", "--jobs", "2"]) == 0
    printed = capsys.readouterr().out
    assert "schedules 40 (drop 10, hold 10, mask 10, paper 10)" in printed
    assert "violations 0" in printed
    assert "events " in printed


def test_a_soak_that_finds_something_ends_with_1_and_names_the_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scheduler.Scheduler, "_fits", lambda *_, **__: True)
    assert command.main(["soak", "--schedules", "60", "--jobs", "1"]) == 1
    found = [line for line in capsys.readouterr().out.splitlines() if line.startswith("seed ")]
    assert found
    assert "I9 at" in found[0]
    seed, policy = found[0].split()[1].rstrip(","), found[0].split()[3].rstrip(":")
    assert command.main(["replay", seed, "--policy", policy]) == 1
    story = capsys.readouterr().out
    assert "I9 at" in story
    assert "admit: uid" in story


def test_a_soak_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match="schedules >= 1"):
        soak.run(n=0, first=0, n_jobs=1, as_json=False)


@pytest.mark.slow
@pytest.mark.parametrize("policy", StalenessPolicy)
def test_a_cell_of_the_table_keeps_the_bound_of_its_policy(policy: StalenessPolicy) -> None:
    lengths = policy_table.TAILS["Pareto 1.5"]
    threshold, share = policy_table.longest_tenth(lengths)
    assert 0.2 < share < 0.8
    cell = policy_table.cell(policy, 1, lengths, (True, False), 25, 1, threshold)
    row = dict(zip(policy_table.HEADER[2:], cell.row(share), strict=True))
    if policy is not StalenessPolicy.PAPER:
        assert max(cell.lags) <= 1
    if policy in (StalenessPolicy.HOLD, StalenessPolicy.DROP):
        assert max(cell.ages) <= 1
    assert (cell.dropped > 0) == (policy is StalenessPolicy.DROP)
    assert (cell.trained < cell.tokens) == (policy is StalenessPolicy.MASK)
    assert float(row["speed"]) > 0


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_the_gate_bench_holds_the_configured_number_of_live_prompts(
    policy: StalenessPolicy, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"LIVE": 400, "BATCH": 8, "ETA": 63, "ROUNDS": 5}.items():
        monkeypatch.setattr(gate, name, value)
    timed = gate.round_trip(policy)
    assert timed.live >= 400
    assert timed.us_per_decision > 0
