"""Rows 32, 33 and 34: stragglers, groups that all fail, and each way in which the data ends.

In the simulator with the production head; the soak tests use real processes.
"""

import re
from pathlib import Path
from typing import Any

import pytest

from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.rows import DataCursor, Row
from areal_bus.core.state import HeadState
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Numbers, Scenario, ScenarioLengths, Tail
from tests.faults import ring as real
from tests.faults.simulated import lines, play, scenario, survive

# 32


def straggling(policy: StalenessPolicy, seed: int, **changes: Any) -> Scenario:
    """Pareto 1.2: now and then a sample takes a hundred times as long as the others."""
    tail = ScenarioLengths(Tail.PARETO, 2.0, 1.2, 2000)
    return scenario(seed, policy, batch_size=1, total_steps=40, lengths=tail, patience_s=1e5, **changes)


@pytest.mark.parametrize("policy", StalenessPolicy)
def test_row_32_stragglers_are_treated_as_the_policy_declares(policy: StalenessPolicy) -> None:
    oldest = n_masked = n_dropped = 0
    for seed in range(4):
        ring = survive(straggling(policy, seed), checks=("I2", "I3", "I4"))
        for line in lines(ring, Event.TRAJECTORY):
            oldest = max(oldest, line["clock"] - line["versions"][0])
            n_masked += line["n_masked"]
        n_dropped += len(lines(ring, Event.REFUND, reason="too_old"))
    if policy is StalenessPolicy.HOLD:
        assert (oldest, n_masked, n_dropped) == (1, 0, 0)
    else:  # there are stragglers: this policy lets the others go on
        assert oldest > 1 or n_dropped > 1
        assert (n_masked > 0, n_dropped > 0) == (policy is StalenessPolicy.MASK, policy is StalenessPolicy.DROP)


# 33


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("what", ["p_error", "p_unsampled"])
def test_row_33_when_every_group_fails_the_job_ends_with_the_reason(policy: StalenessPolicy, what: str) -> None:
    """A bounded number of prompts is spent on finding out, however many there are (I11)."""
    one = scenario(1, policy, total_steps=50, **{what: 1.0})
    ring, outcome = play(one)
    assert not outcome.violations
    assert outcome.end is not None
    assert outcome.end.code == 1
    why = r"reward_(error|timeout): no value" if what == "p_error" else "sampling_error: it cannot"
    assert re.fullmatch(rf"16 prompts in a row ended without a reward; the last one: {why}", outcome.end.sentence)
    assert len(lines(ring, Event.ADMIT)) <= 16 + (one.eta + 1) * one.batch_size
    assert not lines(ring, Event.BATCH)


@pytest.mark.soak
def test_row_33_groups_without_a_signal_are_counted_and_move_no_weight(tmp_path: Path) -> None:
    """All answers of all groups are worth the same: versions are counted, no optimizer step is taken, the run ends."""
    job = real.Ring(tmp_path, "reward.function=oddities:constant", "run.total_train_steps=4")
    with job.started():
        job.finish()
    history = job.check_survived()
    assert {line["zero_advantage_share"] for line in job.lines("update")} == {1.0}
    assert {line["n_optimizer_steps"] for line in job.lines("update")} == {0}
    assert len(set(history.digests.values())) == 1


# 34


@pytest.mark.parametrize("policy", StalenessPolicy)
@pytest.mark.parametrize("drop_last", [False, True])
def test_row_34_the_end_of_the_data_in_the_middle_of_a_batch_accounts_for_every_prompt(
    policy: StalenessPolicy, drop_last: bool
) -> None:
    for n_rows in (1, 3, 7):
        for eta in (0, 2):
            ring = survive(scenario(n_rows, policy, eta=eta, n_rows=n_rows, drop_last=drop_last, total_steps=50))
            gone = {line["uid"] for line in lines(ring, Event.REFUND, reason="end_of_data")}
            trained = {line["uid"] for line in lines(ring, Event.TRAJECTORY)}
            assert len(gone) == (n_rows % 2 if drop_last else 0)
            assert ring.head.state.gate.u == n_rows // 2 + (n_rows % 2 and not drop_last)
            again = {line["uid"] for line in lines(ring, Event.REFUND, reason="too_old")}
            assert trained | gone | again == {line["uid"] for line in lines(ring, Event.ADMIT)}


class Broken(Numbers):
    """Rows that end in an error."""

    def draw(self) -> Row | None:
        if self.position == 5:
            raise OSError("the disk with the data has gone")
        return super().draw()


class HeadOfBroken(Head):
    def __init__(self, state: HeadState, *, now: float) -> None:
        state.rows = DataCursor(Broken(None), max_reissues=state.rules.max_reissues)
        super().__init__(state, now=now)


def test_row_34_a_loader_that_raises_ends_the_head_with_its_error_and_is_no_end_of_data() -> None:
    ring = Ring(scenario(), head_class=HeadOfBroken)
    ring.records = []
    with pytest.raises(OSError, match="the disk with the data has gone"):
        ring.run()
    assert not lines(ring, Event.REFUND)
    assert len(lines(ring, Event.ADMIT)) <= 5


@pytest.mark.soak
def test_row_34_rows_whose_workflow_raises_are_refunded_with_the_text(tmp_path: Path) -> None:
    settings = ("workflow.function=oddities:Fussy", "run.total_train_steps=6", "data.shuffle=false")
    job = real.Ring(tmp_path, *settings)
    with job.started():
        job.finish()
    job.check_survived()
    refunds = job.lines("refund", reason="sampling_error")
    assert refunds
    assert all(line["error"].startswith("ValueError: no rows that begin with ") for line in refunds)
    assert "sampling_error: ValueError: no rows that begin with " in job.output  # people hear of it
