"""PPOActor: one update is what plain padded PyTorch would do, and what must not be applied is not.

Several passes over a batch (actor.ppo_epochs) are what a plain loop does, with proximal log-probs that stay fixed.
"""

import array
import json
import math
import random
import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from actors.learner.batching import Batch, Item, build
from actors.learner.link.rendezvous import LearnerRanks, part
from actors.learner.update.ppo import PPOActor, epoch_order, learning_rate
from actors.runtime.stages import stages_of, temperatures_of
from areal_bus.config.learner import ActorConfig
from areal_bus.config.sections import Config
from areal_bus.core.parts.stages import stage_at
from areal_bus.errors import ImpossibleEvent, NonFinite
from areal_bus.messages import ShardItem
from tests.support.forked_ranks import met, run_ranks, write_weights
from tests.support.learner_setup import (
    batch_of,
    gradients,
    prepared,
    random_shard,
    settings,
    shard_item,
    tiny_actor,
    tiny_model,
    update,
    weights,
)

EPS = 0.2


def trained_logps(model: Any, items: Sequence[Item], *, entropy: bool = False) -> list[Tensor]:
    """Log-probs, or entropies, of the trained tokens of each item: one right-padded batch, full logits."""
    longest = max(len(item.ids_T) for item in items)
    ids = torch.stack([torch.nn.functional.pad(item.ids_T, (0, longest - len(item.ids_T))) for item in items])
    mask = torch.stack([torch.arange(longest) < len(item.ids_T) for item in items]).long()
    logp = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
    if entropy:
        entropy_BT = -(logp.exp() * logp).sum(-1)
        return [entropy_BT[row, item.trained_places - 1] for row, item in enumerate(items)]
    return [logp[row, item.trained_places - 1, ids[row, item.trained_places]] for row, item in enumerate(items)]


def rloo_of(item: Any, items: Iterable[Any]) -> float:
    others = [o.reward for o in items if o.group == item.group and o.sample != item.sample]
    return float(item.reward - sum(others) / len(others))


def surrogate(now_N: Tensor, anchor_N: Tensor, advantage: float) -> Tensor:
    """Clipped, with its sign turned."""
    u = (now_N - anchor_N).exp()
    return -torch.minimum(u * advantage, u.clamp(1 - EPS, 1 + EPS) * advantage)


def padded_gradients(shard: list[ShardItem], *, decoupled: bool = True) -> list[Tensor]:
    """Gradients of one update, plainly: RLOO, token mean over what is trained."""
    model, items = tiny_model().eval(), batch_of(shard, clock=shard[0].clock).items
    losses, n = [], 0
    for item, theta_N in zip(items, trained_logps(model, items), strict=True):
        if len({o.reward for o in items if o.group == item.group}) > 1:
            behav_N, held_N = item.behav_K[item.trained_K], theta_N.detach()
            weight_N = (held_N - behav_N).exp() if decoupled else torch.ones(())
            losses.append((weight_N * surrogate(theta_N, held_N if decoupled else behav_N, rloo_of(item, items))).sum())
            n += item.n_trained
    (torch.stack(losses).sum() / n).backward()
    return [p.grad for p in model.parameters()]


def rloo(**more: Any) -> dict[str, Any]:
    return {"advantage": "rloo", "max_grad_norm": 1e9, **more}


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize("loss", ["decoupled", "plain"])
def test_I2_packed_micro_batches_give_the_gradient_of_one_padded_batch(tmp_path: Path, budget: int, loss: str) -> None:
    """Of the tokens that are not too old: the others are in neither loss nor denominator."""
    shard, is_plain = random_shard(3, clock=3, old=True), loss == "plain"
    keys = rloo(use_decoupled_loss=not is_plain, recompute_logprobs=not is_plain)
    actor = tiny_actor(tmp_path, settings(actor=keys, learner={"max_tokens_per_mb": budget}))
    check_near(gradients(actor, shard), padded_gradients(shard, decoupled=not is_plain))


NEWER: dict[str, dict[str, Any]] = {
    "oapl": {"reward_scaling": 2.0},
    "vcpo": {},
    "entropy-scaled": {"advantage": "rloo", "correction_upper": 0.1},
}  # beside the files of configs/algorithms/


def newer_loss(name: str, items: Sequence[Item], logp: list[Tensor], entropy: list[Tensor]) -> Tensor:
    """The loss of a batch by the equations of the papers, trajectory by trajectory."""
    n_tokens, losses = sum(item.n_trained for item in items), []
    gaps = [theta_N - item.behav_K[item.trained_K] for item, theta_N in zip(items, logp, strict=True)]
    for item, theta_N, gap_N, entropy_N in zip(items, logp, gaps, entropy, strict=True):
        own = [(o, float(gap.detach().sum())) for o, gap in zip(items, gaps, strict=True) if o.group == item.group]
        if name == "oapl":
            value = 0.5 * math.log(sum(math.exp(o.reward / 0.5) for o, _ in own) / len(own))
            losses.append((gap_N.sum() - 2 * (item.reward - value)).square() / (2 * 2 * len(items)))
        elif name == "vcpo":
            parts = [(math.exp(2 * gap) * o.n_sampled, o.reward) for o, gap in own]
            baseline = sum(w * reward for w, reward in parts) / sum(w for w, _ in parts)
            weight = min(math.exp(float(gap_N.detach().sum())), 8.0)
            losses.append(-weight * (item.reward - baseline) * theta_N.mean() / len(items))
        else:
            held_N = gap_N.detach()
            weight_N = torch.where(held_N.abs() <= 0.1 * entropy_N, held_N.exp(), 0.0)
            losses.append(-(weight_N * rloo_of(item, items) * (theta_N - theta_N.detach()).exp()).sum() / n_tokens)
            assert int((weight_N == 0).sum()) > 0 or item.n_trained < 3
    return torch.stack(losses).sum()


@pytest.mark.parametrize("budget", [1, 30, 10_000])
@pytest.mark.parametrize("name", NEWER)
def test_newer_answers_to_a_lag_have_the_gradient_of_their_equations(tmp_path: Path, name: str, budget: int) -> None:
    """Of trained tokens alone, however the batch is cut; VCPO's step is as short as its weights are unequal."""
    shard = random_shard(3, clock=3, old=True)
    named = tomllib.loads(Path(f"configs/algorithms/{name}.toml").read_text(encoding="utf-8"))["actor"]
    keys = named | NEWER[name] | {"max_grad_norm": 1e9, "optimizer": "sgd", "weight_decay": 0.0, "lr": 0.5}
    actor = tiny_actor(tmp_path, settings(actor=keys, learner={"max_tokens_per_mb": budget}))
    model, items = tiny_model().eval(), batch_of(shard, clock=3).items
    entropy = [entropy_N.detach() for entropy_N in trained_logps(model, items, entropy=True)]
    logp = trained_logps(model, items)
    newer_loss(name, items, logp, entropy).backward()  # type: ignore[no-untyped-call]
    ours = gradients(actor, shard)
    check_near(ours, [p.grad for p in model.parameters()])
    if name == "vcpo":
        w = [
            float((x.detach() - item.behav_K[item.trained_K]).sum().exp()) for x, item in zip(logp, items, strict=True)
        ]
        share = sum(w) ** 2 / (len(w) * sum(x * x for x in w))
        assert 0.1 < share < 0.99
        before = tiny_model().parameters()
        moved = [(b - a) / 0.5 for a, b in zip(actor.policy.parameters().values(), before, strict=True)]
        check_near(moved, [share**0.5 * gradient for gradient in ours])


def check_near(ours: list[Tensor], theirs: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("wanted", ["all", "signal", 40.0])
@pytest.mark.parametrize("budget", [1, 10_000])
def test_the_loss_is_divided_by_the_denominator_of_its_key(tmp_path: Path, wanted: str | float, budget: int) -> None:
    flat = [replace(item, reward=0.5) if item.group == 2 else item for item in random_shard(5, clock=3, old=True)]
    actor = tiny_actor(tmp_path, settings(actor=rloo(loss_denominator=wanted), learner={"max_tokens_per_mb": budget}))
    batch = batch_of(flat, clock=3)
    n_all = sum(item.n_trained for item in batch.items)
    n_signal = sum(item.n_trained for item in batch.items if item.group != 2)
    denominator = {"all": n_all, "signal": n_signal}.get(str(wanted), 40.0)
    assert 0 < n_signal < n_all
    theirs = padded_gradients(flat)  # divided by n_signal
    check_near(gradients(actor, flat), [gradient * n_signal / denominator for gradient in theirs])


def test_I12_every_token_is_trained_masked_or_skipped(tmp_path: Path) -> None:
    shard = random_shard(9, clock=2, old=True) + [
        shard_item(group=3, sample=s, reward=1.0, spans=[[0, 1], [2, 3]], clock=2) for s in range(4)
    ]
    stats = update(tiny_actor(tmp_path), shard)
    assert stats["n_tokens"] == stats["n_tokens_trained"] + stats["n_tokens_masked"] + stats["n_tokens_skipped"]
    assert stats["n_tokens_skipped"] == 12
    assert stats["n_tokens_masked"] > 4


def test_a_batch_without_a_token_to_train_counts_a_version_and_steps_no_optimizer(tmp_path: Path) -> None:
    published: list[int] = []
    actor = tiny_actor(tmp_path)
    actor._context = replace(actor._context, publish=lambda version, _: published.append(version))
    before = weights(actor.policy)
    shard = [shard_item(sample=s, reward=float(s), clock=9, spans=[[0, 4]]) for s in range(4)]
    stats = update(actor, shard)
    assert (actor.version, published, stats["n_optimizer_steps"], stats["masked_share"]) == (10, [10], 0, 1.0)
    assert not {"entropy", "mismatch_kl", "grad_norm", "loss"} & set(stats)
    torch.testing.assert_close(weights(actor.policy), before, atol=0, rtol=0)


def test_an_empty_share_is_an_update_too(tmp_path: Path) -> None:
    assert update(tiny_actor(tmp_path), [])["n_tokens"] == 0


def test_the_figures_of_a_step(tmp_path: Path) -> None:
    shard = [
        shard_item(sample=s, reward=float(s), correct=s in (0, 3), finish="length" if s == 0 else "stop")
        for s in range(4)
    ]
    stats = update(tiny_actor(tmp_path), shard)
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


def test_a_batch_is_trained_at_the_version_it_was_taken_at(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path)
    batch = prepared(actor, random_shard(1))
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
    before = weights(actor.policy)
    with pytest.raises(NonFinite, match="must be finite"):
        update(actor, shard)
    torch.testing.assert_close(weights(actor.policy), before, atol=0, rtol=0)
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
    before = weights(actor.policy)
    with pytest.raises(
        NonFinite, match="1 of 2 minibatches were applied before it, so these weights are neither pushed"
    ):
        update(actor, shard)
    assert any(not torch.equal(before[name], now) for name, now in weights(actor.policy).items())
    assert actor.version == 0
    for attempt in (actor.check_whole, lambda: update(actor, random_shard(2))):
        with pytest.raises(ImpossibleEvent, match="incomplete update of version"):
            attempt()


@pytest.mark.parametrize("recompute", [True, False])
def test_the_mismatch_is_not_of_the_updates_own_steps(tmp_path: Path, recompute: bool) -> None:
    """The sampler is the learner before the update, and the update moves far."""
    more = {"use_decoupled_loss": False, "recompute_logprobs": recompute, "ppo_n_minibatches": 2, "lr": 0.05}
    actor = tiny_actor(tmp_path, settings(actor=rloo(**more), data={"task": "sums", "batch_size": 4}))
    shard = random_shard(8, n_groups=4)
    batch = prepared(actor, shard)
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
    actor = tiny_actor(tmp_path)
    shard = [shard_item(sample=s, reward=float(s), clock=9, spans=[[5, 2], [9, 2]]) for s in range(4)]
    update(actor, shard)
    assert "max_head_offpolicyness = 4 would" in actor._journal.path.read_text()


@pytest.mark.parametrize("limit", [2.0, 1.0005, 1 / 1.0005, 0.5, 1e-3])
def test_a_gradient_above_the_norm_is_scaled_to_it_and_one_below_stays(tmp_path: Path, limit: float) -> None:
    def found(most: float) -> list[Tensor]:
        return gradients(tiny_actor(tmp_path / str(most), settings(actor={"max_grad_norm": most})), random_shard(3))

    free = found(1e9)
    norm = float(torch.stack([g.norm() for g in free]).norm())
    wanted = [gradient * min(limit, 1.0) for gradient in free]
    near = {"rtol": 1e-4, "atol": 1e-9} if limit < 1 else {"rtol": 0, "atol": 0}
    torch.testing.assert_close(found(limit * norm), wanted, **near)


def test_the_learning_rate_warms_up_and_falls_to_zero() -> None:
    actor = ActorConfig(lr=1.0, lr_warmup_steps=4, lr_schedule="linear")
    rates = [learning_rate(actor, step=s, total=14) for s in range(15)]
    assert rates[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.5)
    assert rates[14] == 0
    cosine = ActorConfig(lr=1.0, lr_schedule="cosine")
    assert [learning_rate(cosine, step=s, total=10) for s in (0, 5, 10)] == pytest.approx([1.0, 0.5, 0.0])


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
    check_near(gradients(actor, episodes), plain_gradients(alone, weights))


def plain_gradients(alone: list[ShardItem], weights: str) -> list[Tensor]:
    """One forward pass a trajectory. The advantage is the episode's; "trajectory": each is half of its episode."""
    model = tiny_model().eval()
    losses, n_tokens, n_episodes = [], 0, 0
    for item, built in zip(alone, [batch_of([replace(item, sample=0)]).items[0] for item in alone], strict=True):
        (theta_N,) = trained_logps(model, [built])
        weight_N = (theta_N.detach() - built.behav_K[built.trained_K]).exp()
        terms_N = weight_N * surrogate(theta_N, theta_N.detach(), rloo_of(item, alone[::2]))
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
        batch = prepared(actor, shard)
        found.append(torch.cat([batch.advantages_of(i) for i in range(len(batch.items))]))
    assert torch.allclose(*found, atol=1e-5)


# several passes over a batch

N_GROUPS, VERSIONS, LR, EPS_ADAM = 4, 2, 1e-3, 1e-4
MODELS = {"advantage": "gae", "gae_lambda": 0.9, "kl_ctl": 0.3, "distill_coef": 0.5, "entropy_coef": 0.02}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ppo_n_minibatches": 2},
    "models": MODELS,
    "reward": {"kl_ctl": 0.3, "kl_in": "reward", "m2_threshold": 0.04},
    "adapters": {"lora": {"rank": 4}, "kl_ctl": 0.3},
}


def passes_config(kind: str, *, budget: int = 24, n_epochs: int = 3) -> Config:
    actor = {"advantage": "rloo", "lr": LR, "adam_eps": EPS_ADAM, "max_grad_norm": 1.0, "ppo_epochs": n_epochs}
    critic = {"lr": 1e-4} if kind == "models" else {}
    return settings(actor=actor | KINDS[kind], learner={"max_tokens_per_mb": budget}, critic=critic)


def epoch_batch(version: int, ranks: LearnerRanks | None = None) -> Batch:
    drawn = random_shard(version, clock=version, n_groups=N_GROUPS, old=True)
    if ranks is not None:
        drawn = [item for item in drawn if item.group % ranks.n_shares == ranks.share]
    return build(drawn, step=version, clock=version, n_groups=N_GROUPS, eta=0)


def trained_in_passes(actor: PPOActor) -> list[dict[str, float]]:
    found = []
    for version in range(VERSIONS):
        batch = actor.compute_advantages_and_returns(epoch_batch(version, actor.policy.ranks))
        fixed = {name: {i: one.clone() for i, one in stream.items()} for name, stream in batch.streams.items()}
        found.append(actor.ppo_update(batch))
        assert "prox" in fixed
        for name, stream in fixed.items():
            assert all(torch.equal(batch.streams[name][i], one) for i, one in stream.items()), name
    return found


def by_hand(n_ranks: int) -> dict[str, Tensor]:
    """The weights after VERSIONS updates: full padded batches, plain autograd, AdamW of torch."""
    model = tiny_model().eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), eps=EPS_ADAM, weight_decay=0.0)
    for version in range(VERSIONS):
        items = epoch_batch(version).items
        with torch.no_grad():
            prox = trained_logps(model, items)
        for epoch in range(3):
            for groups in dealt(version, epoch, n_ranks):
                losses, n = [], 0
                for item, now_N, prox_N in zip(items, trained_logps(model, items), prox, strict=True):
                    if item.group in groups:
                        weight_N = (prox_N - item.behav_K[item.trained_K]).exp()
                        losses.append((weight_N * surrogate(now_N, prox_N, rloo_of(item, items))).sum())
                        n += item.n_trained
                optimizer.zero_grad()
                (torch.stack(losses).sum() / n).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def dealt(version: int, epoch: int, n_ranks: int) -> list[set[int]]:
    """The groups of both minibatches of a pass: each rank deals its own ones in turn, rank 1 from the second on."""
    order = epoch_order(settings().run.seed, version, epoch, N_GROUPS) if epoch else list(range(N_GROUPS))
    minibatches: list[set[int]] = [set(), set()]
    for rank in range(n_ranks):
        for i, group in enumerate(group for group in order if group % n_ranks == rank):
            minibatches[(i + rank) % 2].add(group)
    return minibatches


def rank(index: int, endpoint: str, folder: str, size: int) -> None:
    ranks = met(index, endpoint, size)
    for kind in ("plain", "reward"):  # one deals minibatches, the other bounds tokens over the whole minibatch
        actor = tiny_actor(Path(folder) / f"{kind}-{index}", passes_config(kind), ranks=ranks)
        trained_in_passes(actor)
        write_weights(actor, Path(folder) / f"{kind}.safetensors")
    part()


@pytest.mark.parametrize("budget", [1, 24])
def test_several_passes_are_those_of_a_plain_loop(tmp_path: Path, budget: int) -> None:
    actor = tiny_actor(tmp_path, passes_config("plain", budget=budget))
    stats = trained_in_passes(actor)
    assert [one["n_optimizer_steps"] for one in stats] == [6.0, 6.0]
    assert stats[0]["clip_share"] > 0
    assert actor.version == VERSIONS
    torch.testing.assert_close(weights(actor.policy), by_hand(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", ["models", "reward", "adapters"])
def test_several_passes_do_not_depend_on_how_a_minibatch_is_cut(tmp_path: Path, kind: str) -> None:
    found = []
    for budget in (1, 60):
        actor = tiny_actor(tmp_path / str(budget), passes_config(kind, budget=budget))
        trained_in_passes(actor)
        found.append(weights(actor.policy))
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_several_passes_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    run_ranks(__name__, rank.__name__, {"folder": str(tmp_path), "size": 2})
    torch.testing.assert_close(load_file(tmp_path / "plain.safetensors"), by_hand(2), atol=1e-6, rtol=0)
    one = tiny_actor(tmp_path / "one", passes_config("reward"))
    trained_in_passes(one)
    torch.testing.assert_close(load_file(tmp_path / "reward.safetensors"), weights(one.policy), atol=1e-6, rtol=0)


def test_I12_figures_count_a_token_once_and_average_over_the_passes(tmp_path: Path) -> None:
    config = passes_config("models")
    low = config.model_copy(update={"actor": config.actor.model_copy(update={"lr": 1e-12})})
    once = low.model_copy(update={"actor": low.actor.model_copy(update={"ppo_epochs": 1})})
    ours, plain = (
        actor.ppo_update(actor.compute_advantages_and_returns(epoch_batch(0)))
        for actor in (tiny_actor(tmp_path / "a", low), tiny_actor(tmp_path / "b", once))
    )
    for name in ("n_tokens", "n_tokens_trained", "n_tokens_masked", "n_tokens_skipped", "loss", "entropy", "kl_ref"):
        assert ours[name] == pytest.approx(plain[name], rel=1e-5), name
    assert ours["n_tokens_computed"] == 3 * plain["n_tokens_computed"]


def test_each_pass_and_version_has_an_order_of_its_own_that_the_seed_gives_again() -> None:
    orders = [epoch_order(1, version, epoch, 8) for version in range(3) for epoch in (1, 2)]
    assert len({tuple(order) for order in orders}) == len(orders)
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert orders[-1] == epoch_order(1, 2, 2, 8)
    assert orders[-1] != epoch_order(2, 2, 2, 8)


def mixed_shard() -> list[ShardItem]:
    """Two samples of source "a", one with a masked token, and four of "b"."""
    shard = []
    for group, (source, rewards) in enumerate({"a": [1.0, 0.0], "b": [0.5, 0.0, 1.0, 0.0]}.items()):
        n, how = 4 - group, {"group": group, "n_groups": 2, "clock": 3, "prompt": [5, 6 + group]}
        for s, reward in enumerate(rewards):
            spans = [[0, 1], [3, 3]] if (group, s) == (0, 0) else [[3, n]]
            own: dict[str, Any] = {"sampled": [2 + s, 9, 3, 4][:n], "logps": [-2.0 - s] * n, "spans": spans}
            item = shard_item(sample=s, reward=reward, finish="length" if s else "stop", **how, **own)
            shard.append(replace(item, source=source))
    return shard


@pytest.mark.parametrize("budget", [1, 12, 10_000])
def test_groups_of_two_and_four_at_two_temperatures_have_the_gradient_of_a_hand_computation(
    tmp_path: Path, budget: int
) -> None:
    sources = [{"name": "a", "weight": 1, "gconfig": {"n_samples": 2, "temperature": 0.3}}, {"name": "b", "weight": 1}]
    data = {"source": [one | {"path": "rows.jsonl"} for one in sources]}
    config = settings(actor=rloo(), learner={"max_tokens_per_mb": budget}, data=data)
    learner = tiny_actor(tmp_path, config)
    learner.version = 3
    limits = stages_of(config)
    batch = build(
        mixed_shard(), step=3, clock=3, n_groups=2, eta=1, temperatures=temperatures_of(config),
        n_samples=lambda born, source: stage_at(limits, born, source).n_samples,
    )  # fmt: skip
    stats = learner.ppo_update(learner.compute_advantages_and_returns(batch))
    model = tiny_model().eval()
    losses, n, entropies = [], 0, {"a": [], "b": []}
    for one in batch.items:
        heat = {"a": 0.3, "b": 1.0}[one.source]
        logp = (model(input_ids=one.ids_T[None]).logits[0] / heat).log_softmax(-1)
        now = logp[one.trained_places - 1, one.ids_T[one.trained_places]]
        weight_N = (now.detach() - one.behav_K[one.trained_K]).exp()
        losses.append((weight_N * surrogate(now, now.detach(), rloo_of(one, batch.items))).sum())
        n += one.n_trained
        entropies[one.source] += (-(logp.exp() * logp).sum(-1)[one.trained_places - 1]).tolist()
    assert n == 3 + 4 + 4 * 3
    (torch.stack(losses).sum() / n).backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert stats["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    for source, found in entropies.items():
        assert stats[f"entropy/{source}"] == pytest.approx(sum(found) / len(found), rel=1e-5)
    assert (stats["length/a"], stats["length/b"]) == (4.0, 3.0)
    assert (stats["truncated_share/a"], stats["truncated_share/b"]) == (0.5, 0.75)
