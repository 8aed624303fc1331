"""Running mean and deviation: those of all numbers at once in float64, in advantages, values and after a resume."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.algorithms.running import RETURNS, REWARDS, deviation, empty, merged, normalising
from areal_bus.config.learner import ActorConfig
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from tests.support.learner_setup import (
    PLAIN,
    batch_of,
    prepared,
    random_shard,
    settings,
    tiny_actor,
)

NUMBERS = st.lists(st.floats(-1e3, 1e3), max_size=8)


def config_of(**actor: Any) -> Config:
    return settings(actor={"reward_scaling": "running", "lr": 1e-3, **actor})


@given(st.lists(st.lists(NUMBERS, min_size=2, max_size=2), min_size=1, max_size=5))
def test_running_statistics_are_those_of_all_numbers_whatever_the_batches_and_ranks(
    batches: list[list[list[float]]],
) -> None:
    """Two ranks: each passes its own part, and the sums are those of both."""
    state = empty()
    for parts in batches:
        states = [merged(state, torch.tensor(own), with_other(own, other)) for own, other in (parts, parts[::-1])]
        torch.testing.assert_close(*states, rtol=1e-9, atol=1e-9)
        state = states[0]
    every = torch.tensor([x for parts in batches for part in parts for x in part], dtype=torch.float64)
    assert state[0] == len(every)
    if len(every) and float(every.std(unbiased=False)) > 1e-3:
        assert float(state[1]) == pytest.approx(float(every.mean()), abs=1e-3)
        assert deviation(state) == pytest.approx(float(every.std(unbiased=False)), rel=1e-3)
        assert deviation(state, about=0.0) == pytest.approx(float(every.square().mean().sqrt()), rel=1e-3)


def with_other(own: list[float], other: list[float]) -> Callable[[list[float]], list[float]]:
    """Sums over this rank and another that holds the numbers `other`."""
    numbers = [torch.tensor(part, dtype=torch.float32).double() for part in (own, other)]
    mean = float(torch.cat(numbers).mean()) if own or other else 0.0

    def total(values: list[float]) -> list[float]:
        if len(values) == 2:
            return [values[0] + len(other), values[1] + float(numbers[1].sum())]
        return [values[0] + float((numbers[1] - mean).square().sum())]

    return total


def test_rewards_are_normalised_by_all_rewards_so_far(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(advantage="none"))
    seen: list[float] = []
    for version in range(3):
        shard = random_shard(version, clock=version)
        seen += [item.reward for item in shard]
        batch = prepared(actor, shard)
        every = torch.tensor(seen, dtype=torch.float64)
        wanted = (every - every.mean())[-len(shard) :] / (every.std(unbiased=False) + 1e-6)
        torch.testing.assert_close(batch.advantages.double(), wanted, atol=1e-6, rtol=0)
    assert actor.policy.running[REWARDS][0] == len(seen)


def test_equal_rewards_are_centred_and_not_divided() -> None:
    settings_now = normalising(ActorConfig(reward_scaling="running"), merged(empty(), torch.full((5,), 0.3), list))
    assert settings_now.reward_bias == pytest.approx(-0.3)
    assert settings_now.reward_scaling == pytest.approx(1.0, abs=1e-5)


def test_a_change_of_scale_leaves_every_value_as_it_was(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(advantage="gae"))
    assert actor.critic is not None
    with torch.no_grad():
        actor.critic.model.model.get_output_embeddings().weight.normal_(generator=torch.Generator().manual_seed(0))
    for version in range(2):
        batch = batch_of(random_shard(version, clock=version), clock=version)
        actor.version = version
        before = actor.critic.predict(batch, range(len(batch.items)))
        scale = actor.critic.scale
        actor.compute_advantages_and_returns(batch)
        assert actor.critic.scale != scale
        after = actor.critic.predict(batch, range(len(batch.items)))
        for index, values in before.items():
            torch.testing.assert_close(after[index], values, atol=1e-5, rtol=1e-5)
    returns = torch.cat(list(batch.streams["returns"].values()))
    assert actor.policy.running[RETURNS][0] > len(returns)


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"reward_bias": -0.5}, r"actor\.reward_bias \(-0\.5\) has no effect: remove it"),
        (
            {"advantage": "oapl", "loss": "oapl", "correction": "none", "recompute_logprobs": False},
            r'1 / beta of "oapl": set a number',
        ),
    ],
)
def test_settings_that_running_statistics_exclude_are_refused(actor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings(actor={"reward_scaling": "running", **actor}, data=PLAIN))
