"""PPO with a critic: generalized advantages, the value loss, and the critic in checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from actors.learner.algorithms.advantages import generalized_advantages
from actors.learner.checkpoint import checkpoint
from actors.learner.model.critic import value_losses
from areal_bus.config.sections import Config
from areal_bus.errors import CheckpointError
from tests.support.learner_setup import (
    batch_of,
    random_shard,
    save,
    settings,
    shard_item,
    tiny_actor,
    update,
)

CLOCK = 3


def config_of(*, critic: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **actor: Any) -> Config:
    return settings(
        actor={"advantage": "gae", "lr": 1e-3, "max_grad_norm": 1e9} | actor,
        critic={"lr": 1e-2} | (critic or {}),
        learner=learner or {},
    )


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-3, 3)), min_size=1, max_size=12),
    st.floats(-3, 3),
    st.floats(0.1, 1.0),
    st.floats(0.0, 1.0),
)
def test_gae_is_the_discounted_sum_of_td_errors(
    steps: list[tuple[float, float]], after: float, discount: float, lam: float
) -> None:
    rewards, values = (torch.tensor(column, dtype=torch.float64) for column in zip(*steps, strict=True))
    following = torch.cat([values[1:], torch.full((1,), after, dtype=torch.float64)])
    delta = rewards + discount * following - values
    n = len(steps)
    expected = [sum((discount * lam) ** (k - t) * float(delta[k]) for k in range(t, n)) for t in range(n)]
    advantages, returns = generalized_advantages(rewards, values, after, discount=discount, lam=lam)
    assert advantages.tolist() == pytest.approx(expected, abs=1e-9)
    assert torch.allclose(returns, advantages + values)


def test_values_of_masked_tokens_bootstrap_and_are_no_targets(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(discount=0.9, gae_lambda=0.5))
    with torch.no_grad():
        actor.critic.model.model.get_output_embeddings().weight.normal_(std=0.5)
    actor.version = CLOCK
    item = shard_item(reward=1.0, spans=[[0, 2], [3, 2]], clock=CLOCK)
    others = [replace(item, sample=s) for s in range(1, 4)]
    batch = batch_of([item, *others], clock=CLOCK)
    values = actor.critic.predict(batch, [0])[0]
    actor.compute_advantages_and_returns(batch)
    rewards = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    advantages, returns = generalized_advantages(rewards, values.double(), discount=0.9, lam=0.5)
    assert batch.streams["token_advantages"][0].tolist() == pytest.approx(advantages[2:].tolist(), abs=1e-6)
    assert batch.streams["returns"][0].tolist() == pytest.approx(returns[2:].tolist(), abs=1e-6)


def test_a_truncated_answer_is_bootstrapped_by_the_value_of_the_next_state(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(discount=0.9, gae_lambda=0.5, truncated_samples="bootstrap"))
    assert actor.critic is not None
    with torch.no_grad():
        actor.critic.model.model.get_output_embeddings().weight.normal_(std=0.5)
    cut = shard_item(reward=1.0, sampled=[2, 3, 4], finish="length")
    ended = replace(shard_item(reward=1.0, sampled=[2, 3, 4]), sample=1)
    longer = replace(shard_item(sampled=[2, 3, 4, 9]), sample=2)  # its last token follows the same state
    batch = batch_of([cut, ended, longer, replace(cut, sample=3)])
    seen = actor.critic.predict(batch, [0, 1, 2])
    assert torch.allclose(seen[0], seen[2], atol=1e-6)
    assert torch.allclose(seen[0][:3], seen[1], atol=1e-6)
    actor.compute_advantages_and_returns(batch)
    rewards = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64)
    for i, after in ((0, float(seen[0][3])), (1, 0.0)):
        advantages, _ = generalized_advantages(rewards, seen[1].double(), after, discount=0.9, lam=0.5)
        assert batch.streams["token_advantages"][i].tolist() == pytest.approx(advantages.tolist(), abs=1e-6)
    assert float(advantages[2]) == pytest.approx(1.0 - float(seen[1][2]))
    actor.ppo_update(batch)


def test_the_first_updates_may_train_the_critic_alone(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(critic={"warmup_updates": 2}))
    assert actor.critic is not None
    moved = []
    for clock in range(3):
        before = [[p.clone() for p in m.parameters().values()] for m in (actor.policy, actor.critic.model)]
        update(actor, random_shard(4, clock=clock))
        after = [list(m.parameters().values()) for m in (actor.policy, actor.critic.model)]
        moved.append(
            [any(not torch.equal(*p) for p in zip(*pair, strict=True)) for pair in zip(before, after, strict=True)]
        )
    assert moved == [[False, True], [False, True], [True, True]]


def test_value_clipping_takes_the_larger_error() -> None:
    values, old = torch.tensor([1.0, 1.0, 0.1]), torch.tensor([0.0, 0.0, 0.0])
    returns = torch.tensor([2.0, -1.0, 0.5])
    found = value_losses(values, old, returns, 0.2)
    expected = [max((v - r) ** 2, (min(max(v, -0.2), 0.2) - r) ** 2) / 2 for v, r in [(1, 2), (1, -1), (0.1, 0.5)]]
    assert found.tolist() == pytest.approx(expected)
    assert value_losses(values, old, returns, None).tolist() == pytest.approx([0.5, 2.0, 0.08])


def test_the_critic_learns_the_returns(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(lr=1e-9))
    figures = []
    for clock in range(25):
        shard = [replace(i, reward=float(i.group)) for i in random_shard(4, clock=clock)]
        figures.append(update(actor, shard))
    assert figures[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert figures[-1]["explained_variance"] > 0.9
    assert figures[-1]["value_loss"] < 0.1 * figures[0]["value_loss"]
    assert figures[0]["returns_mean"] > 0
    assert figures[0]["critic_grad_norm"] > 0


def test_a_checkpoint_without_a_critic_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path / "a", settings()), tmp_path / "kept")
    actor = tiny_actor(tmp_path / "b", config_of())
    with pytest.raises(CheckpointError, match=r"missing critic in .*: start a new run with its model"):
        checkpoint.restore_critic(folder, actor.critic)
