"""PPO with a critic: generalized advantages, the value loss, and the critic in checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from actors.learner.algorithms.advantages import generalized_advantages
from actors.learner.batching import Batch, build
from actors.learner.checkpoint import checkpoint
from actors.learner.model.critic import value_losses
from actors.learner.update.ppo import PPOActor
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.messages import ShardItem
from tests.support.learner_setup import random_shard, settings, shard_item, tiny_actor

CLOCK = 3


def config_of(*, critic: dict[str, Any] | None = None, learner: dict[str, Any] | None = None, **actor: Any) -> Config:
    return settings(
        actor={"advantage": "gae", "lr": 1e-3, "max_grad_norm": 1e9} | actor,
        critic={"lr": 1e-2} | (critic or {}),
        learner=learner or {},
    )


def batch_of(shard: list[ShardItem], clock: int = CLOCK) -> Batch:
    return build(shard, step=clock, clock=clock, n_groups=shard[0].n_groups, eta=1)


def updated(folder: Path, config: Config, shard: list[ShardItem]) -> tuple[PPOActor, list[Tensor], dict[str, float]]:
    """An actor after one update at version CLOCK, the critic's gradient, and the figures."""
    actor = tiny_actor(folder, config)
    actor.version = CLOCK
    assert actor.critic is not None
    seen: list[Tensor] = []
    model = actor.critic.model
    actor.critic.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in model.parameters().values() if p.grad is not None)
    )
    return actor, seen, actor.ppo_update(actor.compute_advantages_and_returns(batch_of(shard)))


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


def test_a_critic_of_zeros_gives_the_reward_to_every_token(tmp_path: Path) -> None:
    batch = tiny_actor(tmp_path, config_of()).compute_advantages_and_returns(batch_of(random_shard(1), 0))
    for i, item in enumerate(batch.items):
        assert batch.advantages_of(i).tolist() == pytest.approx([item.reward] * item.n_trained)
        assert batch.streams["old_values"][i].tolist() == [0.0] * item.n_trained
    assert batch.computed is not None
    assert batch.computed.all(), "also groups whose rewards are equal"


def test_values_of_masked_tokens_bootstrap_and_are_no_targets(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(discount=0.9, gae_lambda=0.5))
    assert actor.critic is not None
    with torch.no_grad():
        actor.critic.model.model.get_output_embeddings().weight.normal_(std=0.5)
    actor.version = CLOCK
    item = shard_item(reward=1.0, spans=[[0, 2], [3, 2]], clock=CLOCK)
    others = [replace(item, sample=s) for s in range(1, 4)]
    batch = batch_of([item, *others])
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
    batch = batch_of([cut, ended, longer, replace(cut, sample=3)], 0)
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
    actor = tiny_actor(tmp_path, config_of(critic={"warmup_steps": 2}))
    assert actor.critic is not None
    moved = []
    for clock in range(3):
        before = [[p.clone() for p in m.parameters().values()] for m in (actor.policy, actor.critic.model)]
        actor.ppo_update(actor.compute_advantages_and_returns(batch_of(random_shard(4, clock=clock), clock)))
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


@pytest.mark.parametrize("budget", [1, 40])
def test_how_a_minibatch_is_cut_changes_no_gradient_of_the_critic(tmp_path: Path, budget: int) -> None:
    shard = random_shard(2, clock=CLOCK, old=True, n_groups=4)
    found = [
        updated(tmp_path / str(n), config_of(learner={"max_tokens_per_mb": n}), shard)[1] for n in (budget, 10_000)
    ]
    assert any(float(g.abs().max()) > 1e-3 for g in found[0])
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_I2_the_log_prob_of_a_masked_token_changes_nothing_of_the_critic(tmp_path: Path) -> None:
    shard = random_shard(3, clock=CLOCK, old=True)
    changed = []
    for item in shard:
        logps = torch.frombuffer(bytearray(item.logps), dtype=torch.float32)
        logps[: item.spans[0][1]] -= 7.0
        changed.append(replace(item, logps=logps.numpy().tobytes()))
    one, other = (updated(tmp_path / str(i), config_of(), x)[1] for i, x in enumerate((shard, changed)))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_critic_learns_the_returns(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of(lr=1e-9))
    figures = []
    for clock in range(25):
        shard = [replace(i, reward=float(i.group)) for i in random_shard(4, clock=clock)]
        figures.append(actor.ppo_update(actor.compute_advantages_and_returns(batch_of(shard, clock))))
    assert figures[0]["explained_variance"] == pytest.approx(0.0, abs=1e-6)
    assert figures[-1]["explained_variance"] > 0.9
    assert figures[-1]["value_loss"] < 0.1 * figures[0]["value_loss"]
    assert figures[0]["returns_mean"] > 0
    assert figures[0]["critic_grad_norm"] > 0


class Words:
    """Stands where a tokenizer does in an export."""

    def save_pretrained(self, folder: Path) -> None:
        (folder / "words.json").write_text("{}")


def save(actor: PPOActor, folder: Path) -> Path:
    return checkpoint.save(
        folder, policy=actor.policy, optimizer=actor.optimizer, version=actor.version, tokenizer=Words(), keep=1,
        critic=actor.critic,
    )  # fmt: skip


def test_a_resumed_critic_goes_on_bit_for_bit(tmp_path: Path) -> None:
    config = config_of(critic={"eps_clip": 0.1}, gae_lambda=0.9, lr_warmup_steps=9)
    first, _, _ = updated(tmp_path / "a", config, random_shard(5, clock=CLOCK))
    folder = save(first, tmp_path / "kept")
    second = tiny_actor(tmp_path / "b", config)
    checkpoint.restore(checkpoint.load(folder), policy=second.policy, optimizer=second.optimizer)
    second.policy.model.load_state_dict(first.policy.model.state_dict())
    assert second.critic is not None
    checkpoint.restore_critic(folder, second.critic)
    second.version = first.version
    shard = random_shard(6, clock=CLOCK + 1)
    stats = [a.ppo_update(a.compute_advantages_and_returns(batch_of(shard, CLOCK + 1))) for a in (first, second)]
    assert {**stats[0], "update_s": 0} == {**stats[1], "update_s": 0}
    assert first.critic is not None
    for a, b in zip(first.critic.model.parameters().values(), second.critic.model.parameters().values(), strict=True):
        assert torch.equal(a, b)


def test_a_checkpoint_without_a_critic_is_refused_with_a_way_out(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path / "a", settings()), tmp_path / "kept")
    actor = tiny_actor(tmp_path / "b", config_of())
    assert actor.critic is not None
    with pytest.raises(CheckpointError, match=r"missing critic in .*: start a new run with its model"):
        checkpoint.restore_critic(folder, actor.critic)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"critic": {"lr": 1e-3}}, r"\[critic\] is for actor.advantage = .gae.: it is .grpo.; remove critic.lr"),
        ({"actor": {"gae_lambda": 0.9}}, "are for actor.advantage"),
        ({"actor": {"truncated_samples": "bootstrap"}}, "needs the values of a critic"),
        ({"actor": {"advantage": "gae"}, "critic": {"warmup_steps": 10**6}}, "the policy would never be trained"),
    ],
)
def test_settings_of_a_critic_without_one_are_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check(settings(**sections, data={"task": "sums", "chat_template": False}))


def test_groups_of_one_train_with_a_critic(tmp_path: Path) -> None:
    shard = [item for item in random_shard(7, clock=CLOCK, n_groups=5) if item.sample == 0]
    config = config_of()
    check(settings(actor={"advantage": "gae"}, gconfig={"n_samples": 1}, data={"task": "sums", "chat_template": False}))
    assert updated(tmp_path, config, shard)[2]["grad_norm"] > 0
