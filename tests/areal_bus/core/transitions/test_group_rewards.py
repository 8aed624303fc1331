"""Group rewards: whole groups, once, whatever dies; the audit of such rings; each rule left out is noticed."""

import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest

from areal_bus import messages as m
from areal_bus.core.events import Event
from areal_bus.core.head import Head
from areal_bus.core.parts.head_checkpoint import HeadCheckpoint, OpenPrompt, revive
from areal_bus.core.parts.ledger import Ledger, LedgerEntry, PromptState
from areal_bus.core.rows import IssuedRow, Row
from areal_bus.errors import LateEvent
from areal_bus.messages import Role
from areal_bus.storage import head_checkpoints
from areal_lab.staleness.simulator.reward import ranks
from areal_lab.staleness.simulator.ring import Ring
from areal_lab.staleness.simulator.scenario import Fault, Scenario, draw
from tests.areal_bus.core import test_head
from tests.areal_bus.core.test_head import records, sent

KINDS = ("crash", "cut", "stop", "reset", "deaf")


def compared(seed: int) -> Scenario:
    """The schedule of the seed with `reward.group`, and four more faults of its rewards if it has any."""
    scenario, rng = draw(seed), random.Random(f"faults of rewards of {seed}")
    faults = [
        Fault(rng.choice(KINDS), Role.REWARD, rng.randrange(scenario.n_rewards), at_s, rng.uniform(0.5, 30))
        for at_s in (rng.uniform(1, scenario.calm_s) for _ in range(4 if scenario.calm_s else 0))
    ]
    n_samples = max(2, scenario.n_samples)
    return replace(scenario, compares=True, n_samples=n_samples, faults=(*scenario.faults, *faults))


class NeverAsksAgain(Ledger):
    """Forgets the groups of a lost reward."""

    def _ask(self, entry: LedgerEntry, reward: str | None) -> None:
        was_asked = entry.asked is not None
        super()._ask(entry, reward)
        if reward is None and was_asked:
            self.uncompared.discard(entry.uid)


class KeepsAnyGroup(Ledger):
    """Reopens a group with a verdict that compared other samples."""

    def reopen(self, entry: LedgerEntry) -> None:
        if not entry.missing and entry.singles is None:
            entry.singles = dict(entry.scored)
        super().reopen(entry)


@pytest.mark.slow
@pytest.mark.parametrize("broken", [NeverAsksAgain, KeepsAnyGroup])
def test_a_rule_of_group_rewards_that_is_left_out_is_noticed(broken: type[Ledger]) -> None:
    class Broken(Head):
        def __init__(self, state, *, now):  # type: ignore[no-untyped-def]
            state.ledger = broken(compares=True)
            super().__init__(state, now=now)

    assert any(Ring(compared(seed), head_class=Broken).run().violations for seed in range(400))


def scored(sample: int, reward: float, *, status: str = "value") -> m.Scored:
    return replace(test_head.scored(0, sample), status=status, reward=reward, ids=bytes(16), text="a" * (sample + 1))


def complete(order: Sequence[int]) -> Ledger:
    """A ledger with one group of 4, whose samples 0 to 3 have 1 to 4 characters; verdicts in this order."""
    ledger = Ledger(compares=True)
    ledger.admit(born=0, n_samples=4, holder="generator-0.0")
    for sample in order:
        ledger.deliver(scored(sample, 0.5))
    return ledger


def test_ranks_of_lengths_are_the_same_in_every_order_of_verdicts() -> None:
    for order in permutations(range(4)):
        ledger = complete(order)
        entry = ledger.ask("reward-0.0")
        assert entry.state is PromptState.COMPARING
        lengths = [float(len(one.text)) for _, one in sorted(entry.scored.items())]
        ledger.compared("reward-0.0", 0, 0, ranks(lengths))
        assert entry.state is PromptState.READY
        assert [one.reward for _, one in sorted(entry.scored.items())] == [0, 1 / 3, 2 / 3, 1]
        assert [one.reward for one in entry.verdicts.values()] == [0.5] * 4


def test_a_verdict_of_a_group_counts_once_from_the_reward_that_was_asked_last() -> None:
    ledger = complete(range(4))
    ledger.ask("reward-0.0")
    ledger.lose("reward-0.0")
    with pytest.raises(LateEvent, match="comparing"):
        ledger.compared("reward-0.0", 0, 0, ranks([1, 2, 3, 4]))
    ledger.ask("reward-1.0")
    with pytest.raises(LateEvent, match=r"asked of reward-1\.0"):
        ledger.compared("reward-0.0", 0, 0, ranks([1, 2, 3, 4]))
    ledger.compared("reward-1.0", 0, 0, ranks([1, 2, 3, 4]))
    with pytest.raises(LateEvent, match="ready"):
        ledger.compared("reward-1.0", 0, 0, ranks([1, 2, 3, 4]))
    assert not ledger.n_asked.total()


def test_a_failed_sample_keeps_its_declared_reward_in_a_compared_group() -> None:
    ledger = Ledger(compares=True)
    ledger.admit(born=0, n_samples=3, holder="generator-0.0")
    for sample, status in enumerate(("value", "error", "value")):
        ledger.deliver(scored(sample, -1.0 if status == "error" else 0.5, status=status))
    ledger.ask("reward-0.0")
    entry = ledger.compared("reward-0.0", 0, 0, [0.25, 9.0, 0.75])
    assert [one.reward for _, one in sorted(entry.scored.items())] == [0.25, -1.0, 0.75]


def test_the_verdict_of_a_group_survives_in_the_head_checkpoint(tmp_path: Path) -> None:
    issue = IssuedRow(Row(0, 0, "{}"), 0)
    verdicts = tuple(scored(i, 0.5) for i in range(2))
    open_ = OpenPrompt(0, 0, 2, 0, 0, issue, verdicts, group=(0.0, 1.0))
    path = tmp_path / "checkpoint"
    head_checkpoints.save(path, HeadCheckpoint(1, 1, open=(open_,)))
    (restored,) = head_checkpoints.load(path).open
    assert restored == open_
    entry = revive(restored, None, 1, lambda status, reward: reward)
    ledger = Ledger(compares=True)
    ledger.restart(next_uid=1, term=1)
    ledger.reopen(entry)
    assert (entry.state, [one.reward for one in entry.scored.values()]) == (PromptState.READY, [0.0, 1.0])


def test_a_group_whose_samples_are_made_again_loses_its_verdict() -> None:
    issue = IssuedRow(Row(0, 0, "{}"), 0)
    known = LedgerEntry(0, 0, 2, None)
    known.scored = {0: scored(0, 0.5), 1: replace(scored(1, 0.5), spans=[[3, 1]])}
    known.compare((0.0, 1.0))
    entry = revive(OpenPrompt(0, 0, 2, 0, 0, issue, ()), known, 2, lambda status, reward: reward)
    assert entry.missing == [1]
    assert entry.singles is None
    assert entry.scored[0].reward == 0.5


def test_a_group_over_the_limit_of_a_message_is_refunded_with_its_size() -> None:
    ring = Ring(replace(compared(3), p_error=0.0, faults=(), calm_s=0.0))
    rewards = ring.head.group_rewards
    ledger = ring.head.state.ledger
    rewards.rows.issue(0, IssuedRow(Row(0, 0, "{}"), 0))
    ring.head.state.gate.admit(0)
    ledger.admit(born=0, n_samples=2, holder="generator-0.0")
    for sample in range(2):
        ledger.deliver(replace(scored(sample, 0.5), text="é" * (m.MAX_TEXT_BYTES // 4)))
    member = ring.head.state.members.join(m.Join("reward-0.0", Role.REWARD, 0, 0, "there", 1, ""), 0.0)
    ring.head.state.members.ready(member.name, 1)
    rewards.ask()
    effects = rewards.effects.take()
    assert "this one has" in records(effects, Event.REFUND)[0]["error"]
    assert not sent(effects, m.Group)
