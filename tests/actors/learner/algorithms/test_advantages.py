"""Group baselines, signals and the normalisation over the global batch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.algorithms import advantages as estimators
from actors.learner.algorithms.advantages import ESTIMATORS, normalize
from actors.learner.algorithms.parts import Streams, Trajectories
from areal_bus.config.learner import ActorConfig


def group_advantages(
    rewards: Tensor, groups: Tensor, *, kind: str, unbiased: bool = True, eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    lengths = torch.ones(len(rewards), dtype=torch.int64)
    trajectories = Trajectories(rewards.double(), groups, lengths)
    settings = ActorConfig(std_unbiased=unbiased, std_eps=eps)
    return estimators.group_advantages(trajectories, ESTIMATORS[kind], settings)


@pytest.mark.parametrize("unbiased", [True, False])  # item 4: by n - 1 or by n
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_grpo_is_the_distance_from_the_mean_in_deviations(unbiased: bool, eps: float) -> None:
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0])
    found = group_advantages(rewards, torch.zeros(4, dtype=torch.int64), kind="grpo", unbiased=unbiased, eps=eps)
    expected = (rewards - rewards.mean()) / (rewards.std(unbiased=unbiased) + eps)
    assert torch.allclose(found[0], expected, atol=1e-6)
    assert found[1].all()


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    rewards, groups = torch.tensor([3.0, 0.0, 6.0, 1.0, 2.0]), torch.tensor([7, 7, 7, 2, 2])
    advantages, _ = group_advantages(rewards, groups, kind="rloo")
    assert advantages.tolist() == pytest.approx([3 - 3, 0 - 4.5, 6 - 1.5, -1, 1])


def test_oapl_compares_with_the_log_mean_of_exponential_rewards() -> None:
    rewards, groups = torch.tensor([3.0, 0.0, 900.0, 0.0]), torch.tensor([7, 7, 2, 2])
    advantages, _ = group_advantages(rewards, groups, kind="oapl")
    value = 0.5 * math.log((math.exp(3.0 / 0.5) + 1) / 2)
    assert advantages.tolist() == pytest.approx([3 - value, -value, math.log(2) / 2, math.log(2) / 2 - 900])


def test_opo_offpolicy_weighs_the_baseline_by_length_and_squared_weight() -> None:
    lengths, rewards = torch.tensor([2, 6, 1]), torch.tensor([1.0, 0.0, 4.0]).double()

    def found(*log_weights: float) -> list[float]:
        streams = Streams({"log_weight": torch.tensor(log_weights, dtype=torch.float64)})
        trajectories = Trajectories(rewards, torch.zeros(3, dtype=torch.int64), lengths, streams)
        return ESTIMATORS["opo_offpolicy"].estimate(trajectories, ActorConfig()).tolist()

    baseline = (2 * 4 * 1 + 6 * 1 * 0 + 1 * 9 * 4) / (2 * 4 + 6 * 1 + 1 * 9)
    assert found(math.log(2), 0.0, math.log(3)) == pytest.approx([1 - baseline, -baseline, 4 - baseline])
    assert found(500 + math.log(2), 500.0, 500 + math.log(3)) == pytest.approx([1 - baseline, -baseline, 4 - baseline])


def test_equal_rewards_give_exactly_zero_and_no_signal() -> None:
    for kind in ("grpo", "rloo"):
        rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 1.0])
        advantages, signal = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), kind=kind)
        assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
        assert signal.tolist() == [False] * 3 + [True] * 3


def test_without_a_baseline_the_reward_is_the_advantage() -> None:
    rewards = torch.tensor([5.0, 5.0, -5.0, 5.0, 1.0])
    advantages, signal = group_advantages(rewards, torch.tensor([0, 0, 1, 1, 2]), kind="none")
    assert advantages.tolist() == rewards.tolist()
    assert signal.tolist() == [False, False, True, True, False]


@given(st.floats(-10, 10), st.integers(1, 50))
def test_equal_values_normalise_to_exactly_nothing(value: float, n: int) -> None:
    weights = torch.arange(1, n + 1, dtype=torch.float64)
    result = normalize(torch.full((n,), value), weights, torch.ones(n, dtype=torch.bool), list)
    assert result.tolist() == [0.0] * n


def test_a_group_of_one_has_no_baseline() -> None:
    with pytest.raises(ValueError, match="at least 2 samples"):
        group_advantages(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), kind="rloo")


def test_a_reward_that_is_no_number_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, math.nan]), torch.tensor([0, 0]), kind="grpo")


@pytest.mark.parametrize("unbiased", [True, False])
def test_normalised_advantages_weigh_each_trained_token_once(unbiased: bool) -> None:
    advantages = torch.tensor([1.0, -1.0, 4.0, 0.0])
    weights = torch.tensor([3.0, 1.0, 0.0, 5.0])  # the third has only masked tokens, the fourth no signal
    signal = torch.tensor([True, True, True, False])
    result = normalize(advantages, weights, signal, list, unbiased=unbiased, eps=0.25)
    tokens = torch.tensor([1.0, 1.0, 1.0, -1.0])
    expected = (tokens - tokens.mean()) / (tokens.std(unbiased=unbiased) + 0.25)
    assert torch.allclose(result[:2], expected[[0, 3]], atol=1e-6)
    assert result[3] == 0


def test_normalisation_over_two_ranks_is_that_of_one() -> None:
    advantages = torch.randn(6, generator=torch.Generator().manual_seed(1))
    weights, signal = torch.tensor([1.0, 2, 3, 4, 5, 6]), torch.ones(6, dtype=torch.bool)
    whole = normalize(advantages, weights, signal, list)
    n, first = float(weights.sum()), float((weights * advantages.double()).sum())
    second = float((weights * (advantages.double() - first / n).square()).sum())
    answers = iter([[n, first], [second]])
    half = normalize(advantages[:3], weights[:3], signal[:3], lambda _: next(answers))
    assert torch.allclose(half, whole[:3])


@given(
    st.lists(st.lists(st.floats(-5, 5), min_size=2, max_size=8), min_size=1, max_size=6),
    st.sampled_from(["grpo", "rloo"]),
)
def test_groups_of_unequal_sizes_have_the_advantages_that_each_has_alone(sizes: list[list[float]], kind: str) -> None:
    rewards = torch.tensor([reward for group in sizes for reward in group], dtype=torch.float64)
    groups = torch.tensor([i for i, group in enumerate(sizes) for _ in group])
    advantages, signal = group_advantages(rewards, groups, kind=kind)
    for i, group in enumerate(sizes):
        alone = group_advantages(torch.tensor(group, dtype=torch.float64), torch.zeros(len(group)), kind=kind)
        assert torch.allclose(advantages[groups == i], alone[0], atol=1e-4, rtol=1e-4)
        assert signal[groups == i].tolist() == alone[1].tolist()


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=9))
def test_rloo_is_n_over_n_minus_1_times_dr_grpo(rewards: list[float]) -> None:
    groups, n = torch.zeros(len(rewards), dtype=torch.int64), len(rewards)
    rloo, _ = group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, kind="rloo")
    dr_grpo, _ = group_advantages(torch.tensor(rewards, dtype=torch.float64), groups, kind="dr_grpo")
    assert torch.allclose(rloo, dr_grpo * n / (n - 1), atol=1e-5)
