"""actor.ppo_epochs: several passes over a batch are what a plain loop does, with proximal log-probs that stay fixed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from actors.learner.batching import Batch, build
from actors.learner.link.rendezvous import LearnerRanks, meet, part
from actors.learner.model.policy import whole
from actors.learner.update.ppo import PPOActor, epoch_order
from actors.learner.update.simulated_update import simulated_update
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.messages import ShardItem
from areal_bus.weights.process_group import join_store
from tests.support.forked_ranks import run_ranks
from tests.support.learner_setup import random_shard, settings, tiny_actor, tiny_model

N_GROUPS, VERSIONS, LR, EPS_ADAM, EPS = 4, 2, 1e-3, 1e-4, 0.2
MODELS = {"advantage": "gae", "gae_lambda": 0.9, "kl_ctl": 0.3, "distill_coef": 0.5, "entropy_coef": 0.02}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"ppo_n_minibatches": 2},
    "models": MODELS,
    "reward": {"kl_ctl": 0.3, "kl_in": "reward", "m2_threshold": 0.04},
    "adapters": {"lora": {"rank": 4}, "kl_ctl": 0.3},
}


def config_of(kind: str, *, budget: int = 24, n_epochs: int = 3) -> Config:
    actor = {"advantage": "rloo", "lr": LR, "adam_eps": EPS_ADAM, "max_grad_norm": 1.0, "ppo_epochs": n_epochs}
    critic = {"lr": 1e-4} if kind == "models" else {}
    return settings(actor=actor | KINDS[kind], learner={"max_tokens_per_mb": budget}, critic=critic)


def shard_of(version: int) -> list[ShardItem]:
    return random_shard(version, clock=version, n_groups=N_GROUPS, old=True)


def batch_of(version: int, ranks: LearnerRanks | None = None) -> Batch:
    drawn = shard_of(version)
    if ranks is not None:
        drawn = [item for item in drawn if item.group % ranks.n_shares == ranks.share]
    return build(drawn, step=version, clock=version, n_groups=N_GROUPS, eta=0)


def trained(actor: PPOActor) -> list[dict[str, float]]:
    found = []
    for version in range(VERSIONS):
        batch = actor.compute_advantages_and_returns(batch_of(version, actor.policy.ranks))
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
        items = batch_of(version).items
        longest = max(len(item.ids_T) for item in items)
        ids = torch.stack([torch.nn.functional.pad(item.ids_T, (0, longest - len(item.ids_T))) for item in items])
        mask = torch.stack([torch.arange(longest) < len(item.ids_T) for item in items]).long()

        def tokens(ids: Tensor = ids, mask: Tensor = mask, items: list[Any] = items) -> list[Tensor]:
            logp = model(input_ids=ids, attention_mask=mask).logits.log_softmax(-1)
            places = [item.trained_places for item in items]
            return [logp[row, at - 1, ids[row, at]] for row, at in enumerate(places)]

        with torch.no_grad():
            prox = tokens()
        for epoch in range(3):
            for groups in dealt(version, epoch, n_ranks):
                now, losses, n = tokens(), [], 0
                for row, item in enumerate(items):
                    if item.group not in groups:
                        continue
                    others = [o.reward for o in items if o.group == item.group and o.sample != item.sample]
                    advantage = item.reward - sum(others) / len(others)
                    u = (now[row] - prox[row]).exp()
                    w = (prox[row] - item.behav_K[item.trained_K]).exp()
                    losses.append(-(w * torch.minimum(u * advantage, u.clamp(1 - EPS, 1 + EPS) * advantage)).sum())
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
    store = join_store(endpoint, 60.0)
    ranks = meet(store, index=index, size=size, interface="lo", device="cpu", timeout_s=60.0)
    for kind in KINDS:
        actor = tiny_actor(Path(folder) / f"{kind}-{index}", config_of(kind), ranks=ranks)
        trained(actor)
        weights = {name: whole(p).detach().clone() for name, p in actor.policy.parameters().items()}
        if index == 0:
            save_file(weights, Path(folder) / f"{kind}.safetensors")
    part()


def weights_of(actor: PPOActor) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in actor.policy.parameters().items()}


def check_near(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    gap = max(float((found[name] - value).abs().max()) for name, value in wanted.items())
    assert gap <= 1e-6, gap


@pytest.mark.parametrize("budget", [1, 24, 10_000])
def test_several_passes_are_those_of_a_plain_loop(tmp_path: Path, budget: int) -> None:
    actor = tiny_actor(tmp_path, config_of("plain", budget=budget))
    stats = trained(actor)
    assert [one["n_optimizer_steps"] for one in stats] == [6.0, 6.0]
    assert stats[0]["clip_share"] > 0
    assert actor.version == VERSIONS
    check_near(weights_of(actor), by_hand(1))


@pytest.mark.parametrize("kind", ["models", "reward", "adapters"])
def test_several_passes_do_not_depend_on_how_a_minibatch_is_cut(tmp_path: Path, kind: str) -> None:
    found = []
    for budget in (1, 60, 10_000):
        actor = tiny_actor(tmp_path / str(budget), config_of(kind, budget=budget))
        trained(actor)
        found.append(weights_of(actor))
    for other in found[1:]:
        check_near(other, found[0])


@pytest.mark.slow
def test_several_passes_of_two_ranks_are_those_of_one(tmp_path: Path) -> None:
    run_ranks(__name__, rank.__name__, {"folder": str(tmp_path), "size": 2})
    check_near(load_file(tmp_path / "plain.safetensors"), by_hand(2))
    for kind in ("models", "reward", "adapters"):
        one = tiny_actor(tmp_path / f"one-{kind}", config_of(kind))
        trained(one)
        check_near(load_file(tmp_path / f"{kind}.safetensors"), weights_of(one))


def test_I12_figures_count_a_token_once_and_average_over_the_passes(tmp_path: Path) -> None:
    low = config_of("models").model_copy(update={"actor": config_of("models").actor.model_copy(update={"lr": 1e-12})})
    once = low.model_copy(update={"actor": low.actor.model_copy(update={"ppo_epochs": 1})})
    ours, plain = (
        actor.ppo_update(actor.compute_advantages_and_returns(batch_of(0)))
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


@pytest.mark.parametrize("more", [{"loss": "reinforce"}, {"prox_logp_method": "loglinear"}])
def test_several_passes_are_refused_without_a_ratio_to_a_fixed_policy(more: dict[str, Any]) -> None:
    config = settings(actor={"ppo_epochs": 2, **more}, data={"task": "sums", "chat_template": False})
    with pytest.raises(ConfigError, match=r"actor.ppo_epochs > 1 needs a ratio .* lacks: set actor.ppo_epochs = 1"):
        check(config)


def test_a_simulated_update_takes_the_time_of_its_passes() -> None:
    seconds = []
    for n_epochs in (1, 3):
        simulated = simulated_update(settings(learner={"simulated": {"update_s": 1.0, "tokens_per_s": 10.0}},
                                              actor={"ppo_epochs": n_epochs}))  # fmt: skip
        assert simulated is not None
        seconds.append(simulated.seconds(batch_of(0)))
    assert seconds[1] - 1.0 == pytest.approx(3 * (seconds[0] - 1.0))
