"""PPOActor: one update is what plain padded PyTorch would do, and what must not be applied is not."""

import array
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.learner.algorithms.advantages import shape_rewards
from actors.learner.batching import Batch, build
from actors.learner.update.ppo import PPOActor, learning_rate
from areal_bus.config.learner import ActorConfig
from areal_bus.errors import ImpossibleEvent, NonFinite
from areal_bus.messages import ShardItem
from tests.support.learner_setup import random_shard, settings, shard_item, tiny_actor, tiny_model

EPS = 0.2


def batch_of(shard: list[ShardItem], *, clock: int = 0, eta: int = 1) -> Batch:
    return build(shard, step=clock, clock=clock, n_groups=shard[0].n_groups if shard else 0, eta=eta)


def at_version(actor: PPOActor, version: int) -> PPOActor:
    actor.version = version
    return actor


def update(actor: PPOActor, batch: Batch) -> dict[str, float]:
    return actor.ppo_update(actor.compute_advantages_and_returns(batch))


def weights(actor: PPOActor) -> list[Tensor]:
    return [p.detach().clone() for p in actor.policy.parameters().values()]


def padded_gradients(shard: list[ShardItem], *, clock: int, eta: int, decoupled: bool = True) -> list[Tensor]:
    """Gradients of one update, plainly: one right-padded batch, full logits, RLOO, token mean over what is trained."""
    model = tiny_model().eval()
    items = batch_of(shard, clock=clock, eta=eta).items
    longest = max(len(item.ids_T) for item in items)
    ids = torch.stack([torch.nn.functional.pad(item.ids_T, (0, longest - len(item.ids_T))) for item in items])
    mask = torch.stack([torch.arange(longest) < len(item.ids_T) for item in items]).long()
    logp = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    losses, n = [], 0
    for row, item in enumerate(items):
        others = [o.reward for o in items if o.group == item.group and o.sample != item.sample]
        advantage = item.reward - sum(others) / len(others)
        if all(other == item.reward for other in others):
            continue
        for place, behav, trained in zip(item.places_K, item.behav_K, item.trained_K, strict=True):
            if trained:
                theta = logp[row, place - 1, ids[row, place]]
                anchor = theta.detach() if decoupled else behav
                u = torch.exp(theta - anchor)
                weight = torch.exp(theta.detach() - behav) if decoupled else 1.0
                losses.append(-weight * torch.min(u * advantage, u.clamp(1 - EPS, 1 + EPS) * advantage))
                n += 1
    (torch.stack(losses).sum() / n).backward()
    return [p.grad for p in model.parameters()]


def gradients(actor: PPOActor, batch: Batch) -> list[Tensor]:
    """Gradients of one update, before the optimizer would clip or use them."""
    seen: list[Tensor] = []
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.extend(p.grad.clone() for p in actor.policy.parameters().values() if p.grad is not None)
    )
    update(actor, batch)
    return seen


def rloo(**more: Any) -> dict[str, Any]:
    return {"advantage": "rloo", "max_grad_norm": 1e9, **more}


@pytest.mark.parametrize("budget", [1, 30, 10_000])
def test_packed_micro_batches_give_the_gradient_of_one_padded_batch(tmp_path: Path, budget: int) -> None:
    shard = random_shard(3)
    actor = tiny_actor(tmp_path, settings(actor=rloo(), learner={"max_tokens_per_mb": budget}))
    for ours, theirs in zip(gradients(actor, batch_of(shard)), padded_gradients(shard, clock=0, eta=1), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


def test_plain_ppo_clips_around_the_sampler(tmp_path: Path) -> None:
    shard = random_shard(4)
    config = settings(actor=rloo(use_decoupled_loss=False, recompute_logprobs=False))
    ours = gradients(tiny_actor(tmp_path, config), batch_of(shard))
    theirs = padded_gradients(shard, clock=0, eta=1, decoupled=False)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("n_plain", [0, 2])
def test_one_pass_of_the_optimizer_is_as_many_small_ones_and_goes_on_with_their_state(
    n_plain: int, tmp_path: Path
) -> None:
    found = []
    for n in (n_plain, 4):
        actor = tiny_actor(tmp_path / str(n), settings(actor={"lr": 1e-2, "weight_decay": 0.1}))
        (group,) = actor.optimizer.param_groups
        assert group["fused"]
        for step in range(4):
            group["fused"] = step >= n
            update(actor, batch_of(random_shard(step, clock=step), clock=step))
        found.append(weights(actor))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-4, rtol=0)  # of 4 steps of 0.01, where a gradient is rounding


def test_I2_old_tokens_enter_neither_loss_nor_denominator(tmp_path: Path) -> None:
    shard = random_shard(5, clock=3, old=True)
    actor = at_version(tiny_actor(tmp_path, settings(actor=rloo())), 3)
    ours = gradients(actor, batch_of(shard, clock=3, eta=1))
    for a, b in zip(ours, padded_gradients(shard, clock=3, eta=1), strict=True):
        assert torch.allclose(a, b, atol=1e-5, rtol=1e-4)


def test_log_probs_of_masked_tokens_change_nothing(tmp_path: Path) -> None:
    spans = [[0, 2], [3, 2]]
    shards = [
        [
            shard_item(
                sample=s, reward=float(s), spans=spans, clock=3, logps=[old, old, -3.0, -3.0], sampled=[2, 3 + s, 4, 1]
            )
            for s in range(4)
        ]
        for old in (-1.0, -20.0)
    ]
    results = []
    for number, shard in enumerate(shards):
        actor = at_version(tiny_actor(tmp_path / str(number), settings()), 3)
        stats = update(actor, batch_of(shard, clock=3, eta=1))
        results.append((weights(actor), stats))
    assert all(torch.equal(a, b) for a, b in zip(results[0][0], results[1][0], strict=True))
    assert {k: v for k, v in results[0][1].items() if k != "update_s"} == {
        k: v for k, v in results[1][1].items() if k != "update_s"
    }
    assert results[0][1]["masked_share"] == 0.5
    assert results[0][1]["lag_max"] == 0


def test_a_masked_trajectory_stays_in_its_groups_baseline(tmp_path: Path) -> None:
    shard = [
        shard_item(sample=s, reward=r, clock=5, spans=[[0 if s == 3 else 5, 4]]) for s, r in enumerate([0, 0, 0, 4])
    ]
    batch = tiny_actor(tmp_path, settings(actor=rloo())).compute_advantages_and_returns(batch_of(shard, clock=5))
    assert batch.advantages is not None
    assert batch.advantages.tolist() == pytest.approx([-4 / 3, -4 / 3, -4 / 3, 4])


def test_a_separate_proximal_forward_gives_the_same_update(tmp_path: Path) -> None:
    shard = random_shard(6)
    fused, apart = (tiny_actor(tmp_path / name, settings(actor=rloo())) for name in ("fused", "log_ratio"))
    stats = update(fused, batch_of(shard))
    batch = apart.compute_advantages_and_returns(batch_of(shard))
    apart._compute_prox(batch)
    again = apart.ppo_update(batch)
    assert set(batch.streams["prox"]) == set(range(len(shard)))
    for a, b in zip(weights(fused), weights(apart), strict=True):
        assert torch.allclose(a, b, atol=1e-6)
    assert again["mismatch_kl"] == pytest.approx(stats["mismatch_kl"], rel=1e-4)


def test_minibatches_hold_whole_groups_and_step_once_each(tmp_path: Path) -> None:
    config = settings(actor=rloo(ppo_n_minibatches=2), data={"task": "sums", "batch_size": 5})
    actor = tiny_actor(tmp_path, config)
    batch = actor.compute_advantages_and_returns(batch_of(random_shard(7, n_groups=5)))
    parts = actor._minibatches(batch)
    groups = [{batch.items[i].group for i in part.members} for part in parts]
    assert sorted(i for part in parts for i in part.members) == list(range(20))
    assert groups[0] | groups[1] == set(range(5))
    assert not groups[0] & groups[1]
    assert actor.ppo_update(batch)["n_optimizer_steps"] == 2


def test_later_minibatches_are_clipped_around_the_policy_before_the_step(tmp_path: Path) -> None:
    config = settings(actor=rloo(ppo_n_minibatches=2, lr=0.05), data={"task": "sums", "batch_size": 4})
    stats = update(tiny_actor(tmp_path, config), batch_of(random_shard(8, n_groups=4)))
    assert stats["clip_share"] > 0  # the second minibatch has moved away from the proximal policy


def test_groups_without_signal_are_skipped_and_counted(tmp_path: Path) -> None:
    flat = [shard_item(group=1, sample=s, reward=1.0, n_groups=2) for s in range(4)]
    mixed = [shard_item(group=0, sample=s, reward=float(s), n_groups=2) for s in range(4)]
    config = settings(actor={"loss_denominator": "signal"})
    actor, without = tiny_actor(tmp_path / "a", config), tiny_actor(tmp_path / "b", config)
    stats = update(actor, batch_of(mixed + flat))
    update(without, batch_of(mixed))
    assert (stats["n_tokens"], stats["n_tokens_trained"], stats["n_tokens_skipped"]) == (32, 16, 16)
    assert stats["zero_advantage_share"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(weights(actor), weights(without), strict=True))


@pytest.mark.parametrize("wanted", ["all", "signal", 40.0])
@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_loss_is_divided_by_the_denominator_of_its_key(tmp_path: Path, wanted: str | float, budget: int) -> None:
    flat = [replace(item, reward=0.5) if item.group == 2 else item for item in random_shard(5, clock=3, old=True)]
    actor = tiny_actor(tmp_path, settings(actor=rloo(loss_denominator=wanted), learner={"max_tokens_per_mb": budget}))
    batch = batch_of(flat, clock=3, eta=1)
    n_all = sum(item.n_trained for item in batch.items)
    n_signal = sum(item.n_trained for item in batch.items if item.group != 2)
    denominator = {"all": n_all, "signal": n_signal}.get(str(wanted), 40.0)
    assert 0 < n_signal < n_all
    ours = gradients(at_version(actor, 3), batch)
    for a, b in zip(ours, padded_gradients(flat, clock=3, eta=1), strict=True):  # divides by n_signal
        assert torch.allclose(a, b * n_signal / denominator, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("over", ["signal", "all"])
def test_the_normalisation_counts_groups_without_signal_or_not(tmp_path: Path, over: str) -> None:
    flat = [replace(item, reward=0.5) if item.group == 2 else item for item in random_shard(5)]
    config = settings(actor=rloo(normalize_batch=True, normalize_batch_over=over, std_unbiased=False))
    batch = tiny_actor(tmp_path, config).compute_advantages_and_returns(batch_of(flat))
    assert batch.advantages is not None
    assert batch.signal is not None
    tokens = torch.cat(
        [
            batch.advantages[i].expand(item.n_trained)
            for i, item in enumerate(batch.items)
            if over == "all" or item.group != 2
        ]
    )
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(tokens.std(unbiased=False)) == pytest.approx(1.0, abs=1e-4)
    of_flat = batch.advantages[[item.group == 2 for item in batch.items]]
    assert bool((of_flat != 0).all()) == (over == "all")
    assert batch.signal.all() == (over == "all")


PAPER = {"advantage": "none", "reward_bias": -0.5, "reward_scaling": 10.0, "normalize_batch": True}


@pytest.mark.parametrize("over", ["all", "signal"])
def test_the_papers_advantages_are_normalised_over_the_batch_without_a_groups_baseline(
    tmp_path: Path, over: str
) -> None:
    rewards = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    shard = [shard_item(group=i // 4, sample=i % 4, reward=reward, n_groups=2) for i, reward in enumerate(rewards)]
    actor = tiny_actor(tmp_path, settings(actor=PAPER | {"normalize_batch_over": over}))
    batch = actor.compute_advantages_and_returns(batch_of(shard))
    assert batch.advantages is not None
    counted = torch.tensor([10 * r - 5 for r in rewards if over == "all"] or [5.0, -5.0, -5.0, -5.0])
    tokens = counted.repeat_interleave(4)
    expected = (counted - tokens.mean()) / (tokens.std() + 1e-6)
    assert torch.allclose(batch.advantages[-len(counted) :], expected, atol=1e-5)
    stats = actor.ppo_update(batch)
    assert stats["reward"] == 5 / 8, "the journal keeps the reward as it was given"
    assert stats["zero_advantage_share"] == (0.0 if over == "all" else 0.5)
    assert stats["n_tokens_trained"] == (32 if over == "all" else 16)


@pytest.mark.parametrize("over", ["all", "signal"])
def test_without_a_baseline_a_batch_of_equal_rewards_trains_nothing(tmp_path: Path, over: str) -> None:
    shard = [shard_item(group=i // 4, sample=i % 4, reward=0.1, n_groups=2) for i in range(8)]
    stats = update(tiny_actor(tmp_path, settings(actor=PAPER | {"normalize_batch_over": over})), batch_of(shard))
    assert (stats["zero_advantage_share"], stats["n_optimizer_steps"], stats["n_tokens_skipped"]) == (1.0, 0, 32)


def test_without_any_baseline_only_a_reward_of_nothing_trains_nothing(tmp_path: Path) -> None:
    shard = [shard_item(group=i // 4, sample=i % 4, reward=float(i < 4), n_groups=2) for i in range(8)]
    stats = update(tiny_actor(tmp_path, settings(actor={"advantage": "none"})), batch_of(shard))
    assert (stats["n_tokens_trained"], stats["zero_advantage_share"]) == (16, 0.5)


def test_I12_every_token_is_trained_masked_or_skipped(tmp_path: Path) -> None:
    shard = random_shard(9, clock=2, old=True) + [
        shard_item(group=3, sample=s, reward=1.0, spans=[[0, 1], [2, 3]], clock=2) for s in range(4)
    ]
    stats = update(at_version(tiny_actor(tmp_path), 2), batch_of(shard, clock=2, eta=1))
    assert stats["n_tokens"] == stats["n_tokens_trained"] + stats["n_tokens_masked"] + stats["n_tokens_skipped"]
    assert stats["n_tokens_skipped"] == 12
    assert stats["n_tokens_masked"] > 4


def test_a_batch_without_a_token_to_train_counts_a_version_and_steps_no_optimizer(tmp_path: Path) -> None:
    published: list[int] = []
    actor = at_version(tiny_actor(tmp_path), 9)
    actor._context = replace(actor._context, publish=lambda version, _: published.append(version))
    before = weights(actor)
    shard = [shard_item(sample=s, reward=float(s), clock=9, spans=[[0, 4]]) for s in range(4)]
    stats = update(actor, batch_of(shard, clock=9, eta=1))
    assert (actor.version, published, stats["n_optimizer_steps"], stats["masked_share"]) == (10, [10], 0, 1.0)
    assert not {"entropy", "mismatch_kl", "grad_norm", "loss"} & set(stats)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))


def test_an_empty_share_is_an_update_too(tmp_path: Path) -> None:
    assert update(tiny_actor(tmp_path), batch_of([]))["n_tokens"] == 0


def test_the_figures_of_a_step(tmp_path: Path) -> None:
    shard = [
        shard_item(sample=s, reward=float(s), correct=s in (0, 3), finish="length" if s == 0 else "stop")
        for s in range(4)
    ]
    stats = update(tiny_actor(tmp_path), batch_of(shard))
    assert stats["reward"] == 1.5
    assert (stats["correct"], stats["completed_accuracy"]) == (0.5, 0.25)
    assert stats["truncated_share"] == 0.25
    assert stats["zero_advantage_share"] == 0
    assert stats["clip_share"] == 0
    assert 0 < stats["entropy"] <= math.log(23)
    assert 0 < stats["ess"] <= 1
    assert stats["mismatch_kl"] > 0
    assert stats["lr"] == pytest.approx(2e-5)
    assert stats["grad_norm"] > 0
    assert stats["loss_denominator"] == 16


def test_the_mismatch_vanishes_when_the_sampler_is_the_learner(tmp_path: Path) -> None:
    model = tiny_model().eval()
    prompt, shard = [5, 6, 7], []
    for s in range(4):
        sampled = [2, 3 + s, 4, 1]
        logp = model(input_ids=torch.tensor([[*prompt, *sampled]])).logits[0].log_softmax(-1)
        logps = [float(logp[2 + k, t].detach()) for k, t in enumerate(sampled)]
        shard.append(shard_item(sample=s, reward=float(s), prompt=prompt, sampled=sampled, logps=logps))
    stats = update(tiny_actor(tmp_path), batch_of(shard))
    assert stats["mismatch_max"] < 1e-5
    assert stats["mismatch_kl"] < 1e-9
    assert stats["ess"] == pytest.approx(1.0)


def test_a_batch_is_trained_at_the_version_it_was_taken_at(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path)
    batch = actor.compute_advantages_and_returns(batch_of(random_shard(1)))
    actor.ppo_update(batch)
    with pytest.raises(ImpossibleEvent, match="clock 0, version 1"):
        actor.ppo_update(batch)


@pytest.mark.parametrize("broken", ["weights", "log-probs"])
def test_an_update_that_is_not_finite_is_neither_applied_nor_published(tmp_path: Path, broken: str) -> None:
    model, shard = tiny_model(), random_shard(2)
    actor = tiny_actor(tmp_path, model=model)
    if broken == "weights":  # at load they would be refused
        actor.policy.parameters()["model.layers.1.mlp.up_proj.weight"].data[3, 4] = math.inf
    else:
        shard[1] = shard_item(sample=1, reward=5.0, n_groups=3, logps=[-3.0, -math.inf, -3.0, -3.0])
    actor._context = replace(actor._context, publish=lambda *_: pytest.fail("a broken update was published"))
    before = weights(actor)
    with pytest.raises(NonFinite, match="must be finite"):
        update(actor, batch_of(shard))
    assert all(torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))
    assert actor.version == 0
    assert not actor.optimizer.state
    folder = tmp_path / "nonfinite" / "step-000000" / "rank-0"
    about = json.loads((folder / "batch.json").read_text())
    kept = load_file(str(folder / "batch.safetensors"))
    assert len(about["items"]) == 12
    assert torch.equal(kept["1/behav_K"], batch_of(shard).items[1].behav_K)


def test_an_update_that_fails_halfway_publishes_no_version(tmp_path: Path) -> None:
    config = settings(actor=rloo(ppo_n_minibatches=2), data={"task": "sums", "batch_size": 2})
    actor = tiny_actor(tmp_path, config)
    actor._context = replace(actor._context, publish=lambda *_: pytest.fail("half an update was published"))
    shard = [
        shard_item(group=g, sample=s, reward=float(s), n_groups=2, logps=[-3.0 if g == 0 else -math.inf] * 4)
        for g in range(2)
        for s in range(4)
    ]
    before = weights(actor)
    with pytest.raises(
        NonFinite, match="1 of 2 minibatches were applied before it, so these weights are neither pushed"
    ):
        update(actor, batch_of(shard))
    assert any(not torch.equal(a, b) for a, b in zip(before, weights(actor), strict=True))
    assert actor.version == 0
    for attempt in (actor.check_whole, lambda: update(actor, batch_of(random_shard(2)))):
        with pytest.raises(ImpossibleEvent, match="only whole updates are trained on, pushed and kept"):
            attempt()


@pytest.mark.parametrize("recompute", [True, False])
def test_the_mismatch_is_not_of_the_updates_own_steps(tmp_path: Path, recompute: bool) -> None:
    """The sampler is the learner before the update, and the update moves far."""
    more = {"use_decoupled_loss": False, "recompute_logprobs": recompute, "ppo_n_minibatches": 2, "lr": 0.05}
    actor = tiny_actor(tmp_path, settings(actor=rloo(**more), data={"task": "sums", "batch_size": 4}))
    shard = random_shard(8, n_groups=4)
    batch = batch_of(shard)
    actor.compute_advantages_and_returns(batch)
    actor._compute_prox(batch)
    for index, logps in batch.streams["prox"].items():
        batch.items[index].behav_K.copy_(logps)
    if not recompute:
        batch.streams["prox"].clear()
    stats = actor.ppo_update(batch)
    assert stats["n_optimizer_steps"] == 2
    assert stats["mismatch_max"] < 1e-5
    assert stats["mismatch_kl"] < 1e-9


def test_much_masking_names_the_eta_that_would_mend_it(tmp_path: Path) -> None:
    actor = at_version(tiny_actor(tmp_path), 9)
    shard = [shard_item(sample=s, reward=float(s), clock=9, spans=[[5, 2], [9, 2]]) for s in range(4)]
    update(actor, batch_of(shard, clock=9, eta=1))
    assert "max_head_offpolicyness = 4 would" in actor._journal.path.read_text()


def test_the_gradient_is_clipped_to_its_norm(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, settings(actor={"max_grad_norm": 1e-3}))
    seen = gradients(actor, batch_of(random_shard(3)))
    assert float(torch.stack([g.norm() for g in seen]).norm()) == pytest.approx(1e-3, rel=1e-3)


@pytest.mark.parametrize(("limit", "is_scaled"), [(2.0, False), (1.0005, False), (1 / 1.0005, True), (0.5, True)])
def test_a_gradient_below_the_norm_stays_as_it_is(tmp_path: Path, limit: float, is_scaled: bool) -> None:
    batch = random_shard(3)
    free = gradients(tiny_actor(tmp_path, settings(actor={"max_grad_norm": 1e9})), batch_of(batch))
    norm = float(torch.stack([g.norm() for g in free]).norm())
    seen = gradients(tiny_actor(tmp_path, settings(actor={"max_grad_norm": limit * norm})), batch_of(batch))
    for was, found in zip(free, seen, strict=True):
        if is_scaled:
            torch.testing.assert_close(found, was * limit, rtol=1e-4, atol=1e-9)
        else:
            assert torch.equal(found, was)


def test_a_length_penalty_is_of_the_limit_that_a_prompt_was_admitted_with(tmp_path: Path) -> None:
    """Prompts of both stages are in one batch, each with the limit in force at `born`."""
    lengths, truncated = torch.tensor([4, 4, 10]), torch.zeros(3, dtype=torch.bool)
    settings = ActorConfig(length_penalty=1.0, overlong_tokens=2)
    shaped = shape_rewards(torch.ones(3), lengths, truncated, settings, max_new_tokens=torch.tensor([5, 10, 10]))
    assert shaped.tolist() == pytest.approx([1 - 0.5 - 0.8, 1 - 0.4, 1 - 1.0 - 1.0])


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    actor = ActorConfig(lr=1.0, lr_warmup_steps=4, lr_schedule="linear")
    rates = [learning_rate(actor, step=s, total=14) for s in range(15)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.5)
    assert rates[14] == 0
    cosine = ActorConfig(lr=1.0, lr_schedule="cosine")
    assert [learning_rate(cosine, step=s, total=10) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


def test_the_loop_learns_a_trivial_reward(tmp_path: Path) -> None:
    """On-policy, sampled by the model itself: the reward is the share of token 2."""
    config = settings(actor={"advantage": "rloo", "lr": 0.02}, run={"total_train_steps": 30})
    actor = tiny_actor(tmp_path, config)
    draw = torch.Generator().manual_seed(0)
    rewards = []
    for step in range(12):
        shard = []
        for group in range(4):
            ids = torch.full((4, 2), 5 + group)
            logps = []
            with torch.no_grad():
                for _ in range(5):
                    logp = _next(actor, ids)
                    token = torch.multinomial(logp.exp(), 1, generator=draw)
                    logps.append(logp.gather(1, token).squeeze(1))
                    ids = torch.cat([ids, token], dim=1)
            for s in range(4):
                shard.append(
                    shard_item(
                        group=group,
                        sample=s,
                        n_groups=4,
                        clock=step,
                        prompt=ids[s, :2].tolist(),
                        sampled=ids[s, 2:].tolist(),
                        logps=[float(column[s]) for column in logps],
                        reward=float((ids[s, 2:] == 2).float().mean()),
                    )
                )
        stats = update(actor, batch_of(shard, clock=step, eta=0))
        rewards.append(stats["reward"])
        assert stats.get("mismatch_max", 0.0) < 1e-4
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.5


def _next(actor: PPOActor, ids: Tensor) -> Tensor:
    """Log-probs of the next token of each row."""
    model = actor.policy.model
    model.set_attn_implementation("sdpa")
    logp: Tensor = model(input_ids=ids, use_cache=False).logits[:, -1].log_softmax(-1)
    model.set_attn_implementation("areal_bus_packed")
    return logp


def of_two_trajectories(shard: list[ShardItem], seed: int) -> tuple[list[ShardItem], list[ShardItem]]:
    """Each sample with a second trajectory behind it; and all trajectories as items of their own, in the same order."""
    draw, episodes, alone = random.Random(seed), [], []
    for item in shard:
        n_given, n_sampled = draw.randint(1, 5), draw.randint(1, 9)
        ids = array.array("i", [draw.randrange(2, 23) for _ in range(n_given + n_sampled)]).tobytes()
        logps = array.array("f", [draw.uniform(-4, -2) for _ in range(n_sampled)]).tobytes()
        segment, span = [n_given, n_sampled], [item.spans[-1][0], n_sampled]
        more = {"ids": item.ids + ids, "logps": item.logps + logps, "trajectories": [*[0] * len(item.segments), 1]}
        episodes.append(replace(item, segments=[*item.segments, segment], spans=[*item.spans, span], **more))
        alone += [item, replace(item, segments=[segment], spans=[span], ids=ids, logps=logps)]
    return episodes, alone


@pytest.mark.parametrize("weights", ["token", "trajectory"])
@pytest.mark.parametrize("budget", [1, 10_000])
def test_an_episode_of_two_trajectories_has_the_gradient_of_both(tmp_path: Path, budget: int, weights: str) -> None:
    episodes, alone = of_two_trajectories(random_shard(5), seed=5)
    keys = rloo(episode_weights=weights, aggregation="seq-mean-token-mean" if weights == "trajectory" else "token-mean")
    actor = tiny_actor(tmp_path, settings(actor=keys, learner={"max_tokens_per_mb": budget}))
    for ours, theirs in zip(gradients(actor, batch_of(episodes)), plain_gradients(alone, weights), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-4)


def plain_gradients(alone: list[ShardItem], weights: str) -> list[Tensor]:
    """One forward pass a trajectory. The advantage is the episode's; "trajectory": each is half of its episode."""
    model = tiny_model().eval()
    losses, n_tokens, n_episodes = [], 0, 0
    for item, built in zip(alone, [batch_of([replace(item, sample=0)]).items[0] for item in alone], strict=True):
        rewards = [o.reward for o in alone[::2] if o.group == item.group]
        advantage = (item.reward - sum(rewards) / len(rewards)) * len(rewards) / (len(rewards) - 1)
        logp = model(input_ids=built.ids_T[None]).logits[0].log_softmax(-1)
        theta_N = logp[built.trained_places - 1, built.ids_T[built.trained_places]]
        terms_N = (
            -(theta_N.detach() - built.behav_K[built.trained_K]).exp() * (theta_N - theta_N.detach()).exp() * advantage
        )
        n_tokens, n_episodes = n_tokens + built.n_trained, n_episodes + 1 / 2
        losses.append(terms_N.sum() if weights == "token" else terms_N.mean() / 2)
    (torch.stack(losses).sum() / (n_tokens if weights == "token" else n_episodes)).backward()
    return [p.grad for p in model.parameters()]


def test_each_trajectory_of_an_episode_ends_with_its_reward(tmp_path: Path) -> None:
    """The token advantages of a critic are those of the trajectories alone."""
    episodes, alone = of_two_trajectories(random_shard(6), seed=6)
    found = []
    for shard in (episodes, [replace(item, sample=i) for i, item in enumerate(alone)]):
        actor = tiny_actor(tmp_path / str(len(shard)), settings(actor={"advantage": "gae", "gae_lambda": 0.9}))
        batch = actor.compute_advantages_and_returns(batch_of(shard))
        found.append(torch.cat([batch.advantages_of(i) for i in range(len(batch.items))]))
    assert torch.allclose(*found, atol=1e-5)
