"""Per-token policy objectives and their statistics; pure, knows nothing of models, batches or denominators.

Shapes: N trained tokens. `theta` = log-probs being trained, `prox` = those of the parameters just before the update,
`behav` = those the sampler stamped.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Terms:
    """What the tokens of one micro-batch contribute. `loss_N` carries the gradient, all else is detached."""

    loss_N: Tensor  # to be summed and divided by the number of trained tokens of the whole minibatch
    clipped_N: Tensor  # bool: the clipped branch was the smaller one, so the token has no gradient


def ppo(
    theta_N: Tensor, anchor_N: Tensor, advantage_N: Tensor, *, eps_clip: float, weight_N: Tensor | None = None
) -> Terms:
    """-weight * min(u A, clip(u, 1 - eps, 1 + eps) A) with u = theta / anchor (PPO; weighted: paper, eq. 5)."""
    ratio_N = torch.exp(theta_N - anchor_N)
    plain_N = ratio_N * advantage_N
    bounded_N = ratio_N.clamp(1 - eps_clip, 1 + eps_clip) * advantage_N
    gain_N = torch.minimum(plain_N, bounded_N)
    if weight_N is not None:
        gain_N = weight_N * gain_N
    return Terms(loss_N=-gain_N, clipped_N=(bounded_N < plain_N).detach())


def decoupled_ppo(
    theta_N: Tensor, prox_N: Tensor, behav_N: Tensor, advantage_N: Tensor, *, eps_clip: float, cap: float | None
) -> Terms:
    """Decoupled PPO (paper, eq. 5): -(prox/behav) * min(u A, clip(u) A), u = theta / prox.

    The weight prox/behav is a constant that is always there; `cap` clamps it from above.
    """
    weight_N = torch.exp(prox_N - behav_N).detach()
    if cap is not None:
        weight_N = weight_N.clamp(max=cap)
    return ppo(theta_N, prox_N.detach(), advantage_N, eps_clip=eps_clip, weight_N=weight_N)


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens that describe how far the learner is from the sampler; they add up over micro-batches."""

    n: int  # tokens
    kl: float  # sum of k3 = exp(d) - 1 - d with d = prox - behav: an estimate of KL(behav || prox), never negative
    largest: float  # max |d|: a maximum, not a sum
    weight: float  # sum of exp(theta - behav)
    weight_squared: float


def mismatch(theta_N: Tensor, prox_N: Tensor, behav_N: Tensor) -> Mismatch:
    """Statistics of one micro-batch, in float64 so that tiny differences survive."""
    if theta_N.numel() == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0)
    with torch.no_grad():
        gap_N = prox_N.double() - behav_N.double()
        weight_N = torch.exp(theta_N.double() - behav_N.double())
        return Mismatch(
            n=theta_N.numel(),
            kl=float((torch.expm1(gap_N) - gap_N).sum()),
            largest=float(gap_N.abs().max()),
            weight=float(weight_N.sum()),
            weight_squared=float(weight_N.square().sum()),
        )


def effective_share(weight: float, weight_squared: float, n: int) -> float:
    """Effective sample size over n: (sum w)^2 / (n sum w^2), 1 when all weights are equal."""
    return weight * weight / (n * weight_squared) if weight_squared > 0 else 0.0
