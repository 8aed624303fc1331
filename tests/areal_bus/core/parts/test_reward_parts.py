"""Parts of a reward by name: their limits, and their means in batches and evaluations."""

import sys
from dataclasses import replace

import pytest

from actors.head.console import Console
from actors.rewards.binding.values import read_value
from actors.rewards.protocol import Score
from areal_bus.core.events import Event
from areal_bus.core.parts import reward_parts
from areal_bus.core.parts.ledger import Ledger
from areal_bus.messages import BatchRequest, Scored
from tests.areal_bus.core.test_head import head_with, records, scored
from tests.areal_bus.core.transitions.test_rollouts import deliver


@pytest.mark.parametrize("value", [1e308, -1.1e100, float("inf"), float("nan")])
def test_a_part_whose_sum_could_overflow_is_refused_by_the_reward_and_by_the_head(value: float) -> None:
    """Two of 1e308 ended the head at each batch, and each next head alike."""
    with pytest.raises(ValueError, match="must be a finite number, at most 1e\\+100"):
        read_value(Score(1.0, None, {"a": value}))
    head, _ = head_with(batch_size=1, n_samples=2)
    effects = deliver(head, *(replace(scored(0, i), parts=reward_parts.dumped({"a": value})) for i in range(2)))
    assert not records(effects, Event.SCORED)
    assert len(records(effects, Event.REFUSED)) == 2


def test_the_head_reports_means_by_name_of_batches_and_evaluations(capsys: pytest.CaptureFixture[str]) -> None:
    head, _ = head_with(batch_size=1, n_samples=2)
    head.on("learner-0.0", BatchRequest(0), 0.0)
    parts = [{"answer": 1.0, "form": 0.0}, {"answer": 0.0, "form": 0.5}]
    effects = deliver(head, *(replace(scored(0, i), parts=reward_parts.dumped(parts[i])) for i in range(2)))
    assert [line["reward:answer"] for line in records(effects, Event.SCORED)] == [1.0, 0.0]
    (batch,) = records(effects, Event.BATCH)
    assert (batch["reward:answer"], batch["reward:form"]) == (0.5, 0.25)
    figures = {"name": "after", "version": 1, "accuracy": None, "reward": 1.0, "version_last": 1}
    figures |= {"n": 4, "n_failed": 0}
    Console(total_steps=1, out=sys.stdout).on("evaluation", figures | {"reward:answer": 0.5, "reward:form": 0.25})
    assert "reward 1.000 (answer 0.500, form 0.250) on 4 held-out answers\n" in capsys.readouterr().out
    failed = {"n": 40, "n_failed": 20, "n_asked": 40, "n_missing": 20}
    Console(total_steps=1, out=sys.stdout).on("evaluation", figures | failed)
    said = "reward 1.000 on 20 of 40 held-out answers, 20 failed and are not in the means\n"
    assert said in capsys.readouterr().out


def with_roles(sample: int, roles: str, reward: float, **role_rewards: float) -> Scored:
    parts = reward_parts.dumped(reward_parts.of_roles(role_rewards))
    return replace(scored(0, sample), roles=roles, reward=reward, parts=parts)


@pytest.mark.parametrize(
    ("samples", "has_signal"),
    [
        ([with_roles(0, "a b", 0.0, a=1, b=-1), with_roles(1, "a b", 0.0, a=-1, b=1)], True),  # the sums are equal
        ([with_roles(0, "a", 1.0), with_roles(1, "b", 0.0)], False),  # no role has two rewards
        ([with_roles(0, "a", 1.0), with_roles(1, "a b", 0.0)], True),
        ([with_roles(0, "a b", 1.0, a=1, b=-1), with_roles(1, "a b", 2.0, a=1, b=-1)], False),
    ],
)
def test_a_group_has_signal_when_the_rewards_of_one_of_its_roles_differ(
    samples: list[Scored], has_signal: bool
) -> None:
    ledger = Ledger()
    ledger.admit(born=0, n_samples=2, holder="g")
    for sample in samples:
        ledger.deliver(sample)
    assert ledger.open[0].has_signal == has_signal
    assert len(ledger.flat) == (not has_signal)


def test_rewards_of_roles_are_all_or_none_of_the_episodes() -> None:
    own = reward_parts.of_roles({"a": 1.0})
    assert reward_parts.broken_roles("a", own | {"form": 0.5}) == reward_parts.broken_roles("a b", {"form": 0.5}) == ""
    assert "missing reward of the role 'b'" in reward_parts.broken_roles("a b", own)
    assert "unknown roles ['a']" in reward_parts.broken_roles("", own)


def test_the_verdict_of_a_group_replaces_the_rewards_of_roles() -> None:
    single = with_roles(0, "a b", 0.5, a=1.0, b=-1.0)
    assert reward_parts.role_rewards(single) == [("a", 1.0), ("b", -1.0)]
    compared = reward_parts.with_group_reward(single, 0.25)
    assert reward_parts.role_rewards(compared) == [("a", 0.25), ("b", 0.25)]
    assert reward_parts.parts_of(compared) == {"single": 0.5}
