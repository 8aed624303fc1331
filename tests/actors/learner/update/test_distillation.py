"""A loss over the teacher's vocabulary: the gradient of an update is that of full float64 logits of both models.

Several ranks and ranks that share a sequence: test_fsdp.py; the divergences alone: test_divergence.py.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tests.actors.learner.algorithms.test_divergence import by_hand, merged
from tests.support.learner_setup import (
    batch_of,
    gradients,
    random_shard,
    settings,
    tiny_actor,
    tiny_model,
    train,
    update,
    watch_gradients,
    weights,
)

HEAT, CLOCK = 0.7, 3
SHARD = random_shard(3, clock=CLOCK, old=True)  # half of the tokens are masked
N_WORDS = 23


def config_of(beta: float | None, top_k: int | None = None, *, budget: int = 24, **actor: Any) -> Config:
    keys = {"advantage": "distill", "max_grad_norm": 1e9, "distill_beta": beta, "distill_top_k": top_k, **actor}
    return settings(actor=keys, learner={"max_tokens_per_mb": budget}, gconfig={"n_samples": 4, "temperature": HEAT})


def logits_of(model: Any) -> list[Tensor]:
    """Float64, of the trained places of each item, at the sampler's temperature."""
    items = batch_of(SHARD, clock=CLOCK).items
    return [model(input_ids=item.ids_T.unsqueeze(0)).logits[0, item.trained_places - 1] / HEAT for item in items]


def hand_gradients(beta: float, top_k: int | None) -> tuple[float, list[Tensor]]:
    """Mean divergence over the trained tokens of an update without a reward, and its gradient."""
    policy, teacher = tiny_model().double().eval(), tiny_model(2).double().eval()
    total = torch.zeros(())
    for ours, theirs in zip(logits_of(policy), logits_of(teacher), strict=True):
        p, q = theirs.softmax(1).detach(), ours.softmax(1)
        if top_k is not None:
            words = p.topk(top_k).indices
            p, q = merged(p, words), merged(q, words)
        total = total + by_hand(p, q, beta).sum()
    mean = total / sum(map(len, logits_of(policy)))
    mean.backward()  # type: ignore[no-untyped-call]
    return float(mean.detach()), [parameter.grad for parameter in policy.parameters()]


@pytest.mark.parametrize(("beta", "top_k"), [(0.0, None), (1.0, None), (0.3, None), (0.0, 4), (1.0, 4), (0.3, 22)])
def test_gradient_of_a_distillation_loss_is_that_of_whole_logits_however_it_is_cut(
    tmp_path: Path, beta: float, top_k: int | None
) -> None:
    value, wanted = hand_gradients(beta, top_k)
    seen = set()
    for budget, chunked in ((10_000, False), (80, True), (30, False)):
        actor = tiny_actor(tmp_path / str(budget), config_of(beta, top_k, budget=budget))
        if chunked:
            actor.policy._max_logits_mib = 1e-5  # one token a chunk
        batch = actor.compute_advantages_and_returns(batch_of(SHARD, clock=CLOCK))
        members = [i for part in actor._minibatches(batch) for i in part.members]
        seen.add(len(actor._passes.micro_batches(batch, members, CLOCK)))
        assert "teacher" not in batch.streams  # no pass of its own
        found = watch_gradients(actor)
        stats = update(actor, SHARD)
        assert stats["kl_teacher"] == pytest.approx(value, abs=1e-6)
        assert stats["n_tokens_forward"] >= stats["n_tokens_computed"]
        for ours, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(ours.double(), theirs, atol=1e-6, rtol=1e-5)
    assert seen >= {1, 2}
    assert max(seen) >= 5


def test_a_loss_by_as_many_words_as_there_are_is_that_by_all_words(tmp_path: Path) -> None:
    whole, same, more = (
        gradients(tiny_actor(tmp_path / str(k), config_of(0.5, k)), SHARD) for k in (None, N_WORDS, 999)
    )
    assert all(torch.equal(one, other) for one, other in zip(whole * 2, same + more, strict=True))


def test_a_loss_beside_the_reward_is_added_with_its_weight(tmp_path: Path) -> None:
    plain = {"advantage": "rloo", "behav_imp_weight_cap": 5.0, "ppo_n_minibatches": 1}
    reward = gradients(tiny_actor(tmp_path / "reward", config_of(None, **plain)), SHARD)
    _, apart = hand_gradients(1.0, None)
    both = gradients(tiny_actor(tmp_path / "both", config_of(1.0, distill_coef=0.25, **plain)), SHARD)
    for ours, one, other in zip(both, reward, apart, strict=True):
        torch.testing.assert_close(ours.double(), one.double() + 0.25 * other, atol=1e-5, rtol=1e-4)


def test_a_model_without_a_linear_head_is_refused_as_pupil_or_teacher(tmp_path: Path) -> None:
    model = tiny_model()
    model.config.logit_scale = 0.5
    with pytest.raises(ConfigError, match=r"actor\.distill_beta needs a model whose logits are the output of a linear"):
        tiny_actor(tmp_path, config_of(None), model=model).policy.check_chunks("actor.distill_beta")


@pytest.mark.parametrize(
    "way", [{"ppo_epochs": 2, "ppo_n_minibatches": 2}, {"lora": {"rank": 4}}], ids=["passes", "adapters"]
)
def test_distillation_brings_the_policy_near_its_teacher_in_several_passes_and_by_adapters(
    tmp_path: Path, way: dict[str, Any]
) -> None:
    found = []
    for budget in (30, 10_000):
        config = config_of(0.0, 6, budget=budget, loss="ppo", lr=3e-3, adam_eps=1e-4, **way)
        actor = tiny_actor(tmp_path / str(budget), config)
        stats = train(actor, range(4))
        found.append(weights(actor.policy))
        assert stats[-1]["kl_teacher"] < 0.97 * stats[0]["kl_teacher"]
    torch.testing.assert_close(*found, atol=1e-6, rtol=0)
