"""A batch shared out among learner ranks; groups without signal that are replaced (data.max_refill)."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_bus.core.effects import Effect
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.ledger import LedgerEntry
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.transitions.batcher import EVEN, Refill, even_out, split
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Scenario
from tests.areal_bus.core.test_head import head_with, lines, records, scored
from tests.areal_bus.core.transitions.test_rollouts import dying
from tests.tools.audit.test_simulated import Recorded, journal
from tools.audit.audit import audit, judge
from tools.run import Run


def spread(shares: list[list[int]], weights: list[int]) -> int:
    tokens = [sum(weights[i] for i in share) for share in shares]
    return max(tokens) - min(tokens)


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 10))
def test_shares_differ_by_at_most_the_longest_group(weights: list[int], n_ranks: int) -> None:
    shares = split(weights, n_ranks)
    assert len(shares) == n_ranks
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))
    assert all(share == sorted(share) for share in shares)
    assert spread(shares, weights) <= max(weights, default=0)


@given(st.lists(st.integers(1, 300), max_size=80), st.integers(1, 10), st.randoms(use_true_random=False))
def test_exchanges_never_make_shares_more_uneven(weights: list[int], n_ranks: int, dice: random.Random) -> None:
    shares: list[list[int]] = [[] for _ in range(n_ranks)]
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        dice.choice(shares).append(index)
    before = spread(shares, weights)
    even_out(shares, weights)
    assert spread(shares, weights) <= before
    assert sorted(index for share in shares for index in share) == list(range(len(weights)))


def test_exchanges_balance_the_split_of_longest_first() -> None:
    assert spread(split([5, 5, 4, 3, 3], 2), [5, 5, 4, 3, 3]) == 0  # longest first ends with 8 and 12, or 9 and 11
    draw = random.Random(1)
    weights = [int(draw.lognormvariate(7, 1)) + 1 for _ in range(2000)]
    assert spread(split(weights, 16), weights) <= 4 * EVEN


# groups that are replaced


def deliver(head: Head, uid: int, *rewards: float) -> list[Effect]:
    verdicts = [replace(scored(uid, sample), reward=reward) for sample, reward in enumerate(rewards)]
    return [effect for verdict in verdicts for effect in head.on("reward-0.0", verdict, 0.0)]


def test_a_group_without_signal_is_refunded_and_a_new_prompt_is_leased_at_once() -> None:
    head, _ = head_with(batch_size=1, eta=1, n_samples=2, max_refill=1)
    effects = deliver(head, 0, 1.0, 1.0)
    (refund,) = records(effects, Event.REFUND)
    assert (refund["uid"], refund["reason"], refund["n_scored"], refund["again"]) == (0, "no_signal", 2, False)
    assert [line["uid"] for line in records(effects, Event.ADMIT)] == [2]


def test_a_group_with_signal_stays_and_so_does_one_beyond_the_bound() -> None:
    head, _ = head_with(batch_size=3, eta=0, n_samples=2, max_refill=1)
    assert not records(deliver(head, 0, 0.0, 1.0), Event.REFUND)
    assert not records(deliver(head, 1, 1.0, 1.0), Event.REFUND), "at eta = 0 it waits for the rest of its batch"
    refunds = records(deliver(head, 2, 0.5, 0.5), Event.REFUND)
    assert [line["uid"] for line in refunds] == [1]


def scenario(seed: int, policy: StalenessPolicy, **more: Any) -> Scenario:
    """Half of the prompts have no signal."""
    return dying(seed, policy, **{"p_flat": 0.5, "max_refill": 3, "n_samples": 2 + seed % 3} | more)


@pytest.mark.parametrize(
    ("owner", "name", "wrong", "noticed"),
    [
        (Refill, "next", lambda self: None, "I8 "),
        (Refill, "next", lambda self: self._ledger.flat.first(), "I3 "),  # without end
        (LedgerEntry, "has_signal", False, "I3 "),
    ],
)
def test_a_rule_of_the_refill_left_out_is_detected(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, wrong: object, noticed: str
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    outcomes = (Ring(scenario(seed, StalenessPolicy.MASK, max_refill=1)).run() for seed in range(10))
    assert next(str(x.violations[0]) for x in outcomes if x.violations).startswith(noticed)


@pytest.mark.parametrize(
    ("most", "text"),
    [(3, "complete and has equal rewards"), (1, "at most data.max_refill = 1 groups are replaced for a batch")],
)
def test_the_audit_catches_a_group_that_was_not_to_be_replaced(tmp_path: Path, most: int, text: str) -> None:
    plan = scenario(2, StalenessPolicy.MASK)
    ring = Recorded(plan)
    assert not ring.run().violations
    replaced = {line["uid"] for line in lines(ring, Event.REFUND)}
    if most == plan.max_refill:  # the equal rewards are others
        for n, line in enumerate(line for line in lines(ring, Event.SCORED) if line["uid"] in replaced):
            line |= {name: line[name] + n for name in line if name == "reward" or name.startswith("reward:role/")}
    found = judge(audit(Run(journal(tmp_path, replace(plan, max_refill=most), ring))))["I3"]
    assert any(text in finding.text for finding in found.findings)
