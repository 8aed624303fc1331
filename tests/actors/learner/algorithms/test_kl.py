"""KL from a reference model and on-policy distillation: estimators, and what they do within PPOActor."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.learner.algorithms.losses import KL_ESTIMATORS
from actors.learner.batching import Batch, build
from actors.learner.model.frozen_model import FrozenModels
from actors.learner.update.ppo import PPOActor
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.messages import ShardItem
from tests.support.learner_setup import frozen_model, random_shard, settings, tiny_actor

PLAIN = {"task": "sums", "chat_template": False}
CLOCK, ETA = 3, 1
LOGITS = torch.tensor([0.3, -1.2, 2.0, 0.7], dtype=torch.float64)
OTHER = torch.tensor([-0.5, 0.4, 1.1, 0.2], dtype=torch.float64)

# estimators


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimator_and_its_gradient_are_those_of_the_formula(name: str) -> None:
    current = torch.tensor([-0.1, -2.0, -3.5, -1.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.4, -2.0, -1.5, -7.0], dtype=torch.float64)
    values = KL_ESTIMATORS[name](current, reference)
    values.sum().backward()  # type: ignore[no-untyped-call]
    assert current.grad is not None
    for value, slope, a, b in zip(
        values.tolist(), current.grad.tolist(), current.tolist(), reference.tolist(), strict=True
    ):
        r = b - a
        wanted = {"k1": (-r, 1.0), "k2": (r * r / 2, -r), "k3": (math.exp(r) - 1 - r, 1 - math.exp(r))}[name]
        assert (value, slope) == pytest.approx(wanted, abs=1e-12)


@pytest.mark.parametrize(
    ("name", "is_unbiased", "direction"), [("k1", True, "none"), ("k2", False, "reverse"), ("k3", True, "forward")]
)
def test_mean_of_an_estimator_and_of_its_gradient_over_the_policy(name: str, is_unbiased: bool, direction: str) -> None:
    """By enumeration of all four tokens, so exact: what the docstrings state."""
    logits = LOGITS.clone().requires_grad_()
    current, reference = logits.log_softmax(0), OTHER.log_softmax(0)
    weights = current.detach().exp()  # how often each token is sampled
    estimate = (weights * KL_ESTIMATORS[name](current, reference)).sum()
    divergence = (current.exp() * (current - reference)).sum()
    assert (estimate.item() == pytest.approx(divergence.item())) == is_unbiased
    (found,) = torch.autograd.grad(estimate, logits, retain_graph=True)
    forward = (reference.exp() * (reference - current)).sum()
    target = {"none": 0 * logits.sum(), "reverse": divergence, "forward": forward}[direction]
    (wanted,) = torch.autograd.grad(target, logits)
    assert torch.allclose(found, wanted, atol=1e-12)


# in the loss and in the reward


def prepared(actor: PPOActor, shard: list[ShardItem]) -> Batch:
    actor.version = CLOCK
    batch = build(shard, step=CLOCK, clock=CLOCK, n_groups=shard[0].n_groups, eta=ETA)
    return actor.compute_advantages_and_returns(batch)


def gradient(actor: PPOActor, shard: list[ShardItem]) -> tuple[list[Tensor], dict[str, float]]:
    """Of the first optimizer step, in which half of the tokens are too old; and the figures of the update."""
    seen: list[list[Tensor]] = []
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in actor.policy.parameters().values() if p.grad is not None])
    )
    stats = actor.ppo_update(prepared(actor, shard))
    return seen[0], stats


def config_of(actor: dict[str, Any], **learner: Any) -> Config:
    return settings(actor={"lr": 1e-3, "max_grad_norm": 1e9, **actor}, learner=learner)


VARIANTS = {
    "k2 in the loss": {"kl_ctl": 0.3, "kl_estimator": "k2"},
    "k3 in the loss": {"kl_ctl": 0.3, "aggregation": "seq-mean-token-mean", "ppo_n_minibatches": 2},
    "k1 in the reward": {"kl_ctl": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "unset in the reward": {"kl_ctl": 0.3, "kl_in": "reward", "recompute_logprobs": False, "correction": "none"},
    "distillation beside the reward": {"distill_coef": 0.5, "advantage": "rloo"},
    "distillation with KL": {"advantage": "distill", "kl_ctl": 0.1},
}


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
def test_how_a_minibatch_is_cut_changes_no_gradient_of_the_KL(tmp_path: Path, variant: str) -> None:
    shard = random_shard(3, clock=CLOCK, old=True, n_groups=4)
    found = []
    for budget in (1, 60, 9999):
        actor = tiny_actor(tmp_path / str(budget), config_of(VARIANTS[variant], max_tokens_per_mb=budget))
        found.append(gradient(actor, shard)[0])
    assert any(float(g.abs().max()) > 1e-4 for g in found[0])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("variant", VARIANTS)
def test_I2_a_masked_token_has_no_influence_on_the_KL(tmp_path: Path, variant: str) -> None:
    shard = random_shard(4, clock=CLOCK, old=True, n_groups=4)
    changed = []
    for item in shard:
        logps = torch.frombuffer(bytearray(item.logps), dtype=torch.float32)
        logps[: item.spans[0][1]] -= 7.0
        changed.append(replace(item, logps=logps.numpy().tobytes()))
    one, other = (
        gradient(tiny_actor(tmp_path / str(i), config_of(VARIANTS[variant])), each)[0]
        for i, each in enumerate((shard, changed))
    )
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_the_reward_loses_the_sum_of_the_KL_over_the_trained_tokens(tmp_path: Path) -> None:
    shard = random_shard(5, clock=CLOCK, old=True)
    actor = {"kl_ctl": 0.2, "kl_in": "reward", "advantage": "none", "reward_scaling": 2.0}
    one = tiny_actor(tmp_path, config_of(actor))
    batch = prepared(one, shard)
    assert batch.advantages is not None
    for i, item in enumerate(batch.items):
        assert len(batch.streams["reference"][i]) == item.n_trained < item.n_sampled
        gap = batch.streams["prox"][i].double() - batch.streams["reference"][i].double()
        wanted = 2.0 * item.reward - 0.2 * float(gap.sum())  # k1
        assert float(batch.advantages[i]) == pytest.approx(wanted, abs=1e-5)


def same_weights(actor: PPOActor, *, reference: bool = False, teacher: bool = False) -> PPOActor:
    """The actor with frozen copies of its own policy."""
    actor.frozen = FrozenModels(
        frozen_model(actor.policy, seed=0) if reference else None,
        frozen_model(actor.policy, seed=0) if teacher else None,
    )
    return actor


def test_the_KL_of_a_policy_that_is_the_reference_is_exactly_zero(tmp_path: Path) -> None:
    shard = random_shard(6, clock=CLOCK)
    plain = gradient(tiny_actor(tmp_path / "plain", config_of({"loss": "gspo"})), shard)[0]
    for i, variant in enumerate([{"kl_estimator": "k2"}, {}, {"kl_in": "reward", "kl_estimator": "k1"}]):
        actor = tiny_actor(tmp_path / str(i), config_of({"loss": "gspo", "kl_ctl": 0.5, **variant}))
        found, stats = gradient(same_weights(actor, reference=True), shard)
        assert stats["kl_ref"] == 0.0
        assert all(torch.allclose(a, b, atol=1e-7) for a, b in zip(plain, found, strict=True))


def test_the_KL_term_pulls_the_policy_back_to_the_reference(tmp_path: Path) -> None:
    flat = [replace(item, reward=1.0) for item in random_shard(7)]  # no signal: the KL is all there is
    actor = tiny_actor(tmp_path, settings(actor={"kl_ctl": 1.0, "kl_estimator": "k2", "lr": 3e-3}))
    seen = []
    for clock in range(4):
        fresh = [replace(i, clock=clock, step=clock, spans=[[clock, i.spans[0][1]]]) for i in flat]
        batch = build(fresh, step=clock, clock=clock, n_groups=3, eta=1)
        stats = actor.ppo_update(actor.compute_advantages_and_returns(batch))
        assert stats["n_tokens_skipped"] == 0
        seen.append(stats["kl_ref"])
    assert seen == sorted(seen, reverse=True)
    assert seen[-1] < 0.8 * seen[0]


# distillation


def test_the_gradient_of_distillation_is_exactly_zero_at_the_teacher(tmp_path: Path) -> None:
    actor = same_weights(tiny_actor(tmp_path, config_of({"advantage": "distill"})), teacher=True)
    found, stats = gradient(actor, random_shard(8, clock=CLOCK))
    assert stats["kl_teacher"] == 0.0
    assert stats["n_tokens_skipped"] == 0
    assert all(not bool(g.any()) for g in found)


def test_distillation_is_the_log_ratio_to_the_teacher_with_or_without_the_reward(tmp_path: Path) -> None:
    shard = random_shard(9, clock=CLOCK, old=True)
    plain = prepared(tiny_actor(tmp_path / "plain", config_of({"advantage": "rloo"})), shard)
    alone = prepared(tiny_actor(tmp_path / "alone", config_of({"advantage": "distill"})), shard)
    both = prepared(tiny_actor(tmp_path / "both", config_of({"advantage": "rloo", "distill_coef": 0.25})), shard)
    for i in range(len(shard)):
        ratio = alone.streams["teacher"][i] - alone.streams["prox"][i]
        assert float(ratio.abs().max()) > 0.01
        assert torch.equal(alone.advantages_of(i), ratio)
        assert torch.allclose(both.advantages_of(i), plain.advantages_of(i) + 0.25 * ratio, atol=1e-6)


def test_a_group_of_one_is_distilled_whatever_its_reward(tmp_path: Path) -> None:
    config = settings(actor={"advantage": "distill"}, gconfig={"n_samples": 1}, data=PLAIN, teacher={"path": "t"})
    check(config)
    shard = [item for item in random_shard(10, clock=CLOCK, n_groups=6) if item.sample == 0]
    rewarded = [replace(item, reward=item.reward + 5.0) for item in shard]
    ours, others = (gradient(tiny_actor(tmp_path / str(i), config), one)[0] for i, one in enumerate((shard, rewarded)))
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


# refusals


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"kl_ctl": 0.1, "kl_estimator": "k1"}}, 'set "k2"'),
        ({"actor": {"kl_estimator": "k2"}}, "set actor.kl_ctl (it is 0)"),
        ({"actor": {"kl_ctl": 0.1, "kl_in": "reward", "kl_estimator": "k2"}}, "refused in the reward"),
        ({"actor": {"kl_ctl": 0.1, "kl_in": "reward", "kl_estimator": "k3"}}, "refused in the reward"),
        ({"reference": {"update_every": 5}}, "set actor.kl_ctl (it is 0), or remove the section"),
        ({"actor": {"advantage": "distill"}}, "set teacher.path"),
        ({"actor": {"distill_coef": 0.1}}, "set teacher.path"),
        ({"teacher": {"path": "t"}}, "names a model that nothing uses"),
        ({"actor": {"advantage": "distill", "distill_coef": 0.1}, "teacher": {"path": "t"}}, "remove one of them"),
        ({"actor": {"advantage": "distill", "reward_clip": 1.0}, "teacher": {"path": "t"}}, "remove actor.reward_clip"),
        (
            {"actor": {"advantage": "distill", "kl_ctl": 0.1, "kl_in": "reward"}, "teacher": {"path": "t"}},
            "remove actor.kl_in",
        ),
    ],
)
def test_a_setting_of_a_frozen_model_that_nothing_reads_is_refused(sections: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(settings(**sections, data=PLAIN))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
