"""Our side of the bench `agreement`: each function on packed trained tokens, its result in the order of the mask."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from actors.learner.algorithms.advantages import (
    ESTIMATORS,
    generalized_advantages,
    group_advantages,
    normalize,
    overlong_penalty,
)
from actors.learner.algorithms.corrections import CORRECTIONS, loglinear_prox, second_moment_threshold
from actors.learner.algorithms.losses import AGGREGATIONS, KL_ESTIMATORS, LOSSES
from actors.learner.algorithms.parts import Tokens, Totals, Trajectories, select, sequences_of
from actors.learner.algorithms.registry import split
from actors.learner.model.critic import value_losses
from areal_bus.config.learner import ActorConfig
from benchmarks.agreement import inputs
from benchmarks.agreement.inputs import Rollouts, draw
from benchmarks.harness.worker_main import serve

Function = Callable[[Rollouts], Tensor]


def tokens_of(rollouts: Rollouts) -> Tokens:
    mask = rollouts.mask_BL
    prox = rollouts.prox_BL[mask]
    return Tokens(
        logprobs_N=rollouts.theta_BL[mask].requires_grad_(),
        anchor_N=prox,
        prox_N=prox,
        behav_N=rollouts.behav_BL[mask],
        advantages_N=rollouts.advantages_BL[mask],
        lags_N=rollouts.lags_BL[mask],
        sequences_N=sequences_of(rollouts.lengths_B),
        lengths_M=rollouts.lengths_B,
    )


def advantage(name: str) -> Function:
    """One value a token, as the peers return it."""
    settings, estimator = ActorConfig(advantage=name, std_eps=1e-6), ESTIMATORS[name]

    def compute(rollouts: Rollouts) -> Tensor:
        trajectories = Trajectories(rollouts.rewards_B, rollouts.groups_B, rollouts.lengths_B)
        values, _ = group_advantages(trajectories, estimator, settings)
        if estimator.normalization:
            everything = torch.ones_like(values, dtype=torch.bool)
            values = normalize(values, rollouts.lengths_B, everything, list, eps=1e-8)
        return values.double()[sequences_of(rollouts.lengths_B)]

    return compute


def loss(name: str, aggregation: str = "token-mean", correction: str = "none", **keys: Any) -> Function:
    """The gradient of the whole loss by the log-prob of each token."""
    settings = ActorConfig(loss=name, aggregation=aggregation, correction=correction, **keys)

    def compute(rollouts: Rollouts) -> Tensor:
        tokens = tokens_of(rollouts)
        losses_N, _ = split(LOSSES[name](tokens, settings))
        totals = Totals(float(rollouts.mask_BL.sum()), float(inputs.B))
        share_N = select(AGGREGATIONS[aggregation](tokens.lengths_M, totals, settings), tokens)
        total = (share_N * CORRECTIONS[correction](tokens, settings) * losses_N).sum()
        (gradient,) = torch.autograd.grad(total, tokens.logprobs_N)
        return gradient

    return compute


def weight(name: str, **keys: Any) -> Function:
    """The correction's weights."""
    return lambda rollouts: CORRECTIONS[name](tokens_of(rollouts), ActorConfig(correction=name, **keys))


def m2po(rollouts: Rollouts) -> Tensor:
    tokens = tokens_of(rollouts)
    squared_N = (tokens.prox_N - tokens.behav_N).square()
    return (squared_N <= second_moment_threshold(squared_N, inputs.M2, list)).double()


def loglinear(rollouts: Rollouts) -> Tensor:
    tokens = tokens_of(rollouts)
    return loglinear_prox(tokens.logprobs_N, tokens.behav_N, tokens.lags_N)


def overlong(rollouts: Rollouts) -> Tensor:
    settings = ActorConfig(overlong_tokens=inputs.OVERLONG, overlong_penalty_factor=inputs.PENALTY)
    return overlong_penalty(rollouts.lengths_B.double(), settings, max_new_tokens=inputs.L)


def gae(rollouts: Rollouts) -> Tensor:
    """Returns: advantages plus values, which no peer whitens."""
    found = []
    for values_L, mask_L, reward in zip(rollouts.values_BL, rollouts.mask_BL, rollouts.rewards_B, strict=True):
        values_K = values_L[mask_L]
        rewards_K = torch.zeros_like(values_K)
        rewards_K[-1] = reward
        found.append(generalized_advantages(rewards_K, values_K, discount=inputs.DISCOUNT, lam=inputs.LAMBDA)[1])
    return torch.cat(found)


def value_loss(rollouts: Rollouts) -> Tensor:
    mask = rollouts.mask_BL
    new_N, old_N = rollouts.new_values_BL[mask].requires_grad_(), rollouts.values_BL[mask]
    returns_N = rollouts.rewards_B[sequences_of(rollouts.lengths_B)]
    total = value_losses(new_N, old_N, returns_N, inputs.VALUE_CLIP).mean()
    (gradient,) = torch.autograd.grad(total, new_N)
    return gradient


def kl(name: str) -> Function:
    return lambda rollouts: KL_ESTIMATORS[name](
        rollouts.theta_BL[rollouts.mask_BL], rollouts.reference_BL[rollouts.mask_BL]
    )


def kl_loss(rollouts: Rollouts) -> Tensor:
    mask = rollouts.mask_BL
    theta_N = rollouts.theta_BL[mask].requires_grad_()
    (gradient,) = torch.autograd.grad(KL_ESTIMATORS["k3"](theta_N, rollouts.reference_BL[mask]).mean(), theta_N)
    return gradient


CLIP: dict[str, Any] = {"eps_clip": inputs.EPS, "eps_clip_higher": inputs.EPS_HIGHER}
BOUNDS: dict[str, Any] = {"correction_lower": inputs.LOWER, "correction_upper": inputs.UPPER}
SEQUENCE: dict[str, Any] = {
    "correction_action": "mask",
    "correction_aggregate": "mean",
    "correction_lower": inputs.SEQUENCE_LOWER,
    "correction_upper": inputs.SEQUENCE_UPPER,
}
BY_MEAN = "seq-mean-token-mean"

SHARED = ("grpo", "dr_grpo", "rloo", "opo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")

FUNCTIONS: dict[str, Function] = {
    **{f"advantage {name}": advantage(name) for name in ESTIMATORS if name in SHARED},
    "loss ppo": loss("ppo", **CLIP),
    "loss ppo, dual clip": loss("ppo", **CLIP, c_clip=inputs.DUAL),
    "loss gspo": loss("gspo", BY_MEAN, **CLIP),
    "loss gmpo": loss("gmpo", BY_MEAN, **CLIP),
    "loss cispo": loss("cispo", **CLIP),
    "loss cispo, upper bound": loss("cispo", eps_clip=1.0, eps_clip_higher=inputs.EPS_HIGHER),
    "loss sapo": loss("sapo", BY_MEAN, sapo_tau=(inputs.TAU_POS, inputs.TAU_NEG)),
    **{f"aggregation {name}": loss("ppo", name, aggregation_length=inputs.L, **CLIP) for name in AGGREGATIONS},
    "decoupled, unbounded": loss("ppo", correction="decoupled", **CLIP),
    "decoupled, clamped": loss("ppo", correction="decoupled", behav_imp_weight_cap=inputs.CAP, **CLIP),
    "decoupled, masked": loss(
        "ppo", correction="decoupled", behav_imp_weight_cap=inputs.CAP, correction_action="mask", **CLIP
    ),
    "weight tis": weight("tis", correction_upper=inputs.CAP),
    "weight tis_sequence": weight("tis_sequence", correction_upper=inputs.CAP),
    "weight icepop": weight("icepop", **BOUNDS),
    "weight by sequence, masked": weight("tis_sequence", **SEQUENCE),
    "weight by k2, masked": weight(
        "icepop", correction_metric="k2", correction_lower=0.0, correction_upper=inputs.KL_UPPER
    ),
    "m2po mask": m2po,
    "loglinear prox": loglinear,
    "overlong penalty": overlong,
    "gae returns": gae,
    "value loss, clipped": value_loss,
    "kl k3 as a loss": kl_loss,
    **{f"kl {name}": kl(name) for name in KL_ESTIMATORS},
}


def compute(seed: int) -> dict[str, list[float]]:
    return {name: function(draw(seed)).detach().tolist() for name, function in FUNCTIONS.items()}


torch.set_num_threads(1)

if __name__ == "__main__":
    serve({"compute": compute})
