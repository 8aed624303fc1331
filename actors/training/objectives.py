"""Policy objectives over trained tokens and their statistics; pure, knows nothing of models, batches or denominators.

The gradient of a loss by its log-probs is written down, not traced: everything is computed once, without autograd, and
the loss carries the finished gradient to its one input that has any.

Shapes: N trained tokens. `theta` = log-probs being trained, `prox` = those of the parameters just before the update,
`behav` = those the sampler stamped.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Gap:
    """How far the learner, before its update, is from the sampler. Detached."""

    weight_N: Tensor  # exp(prox - behav)
    kl: Tensor  # (): sum of k3 = exp(d) - 1 - d with d = prox - behav: an estimate of KL(behav || prox)
    largest: Tensor  # (): max |d|


@torch.no_grad()
def gap(prox_N: Tensor, behav_N: Tensor) -> Gap:
    """In the precision of its inputs: close log-probs subtract exactly, and expm1 keeps what is tiny."""
    d_N = prox_N - behav_N
    if d_N.numel() == 0:
        return Gap(d_N, d_N.sum(), d_N.sum())
    low, high = torch.aminmax(d_N)
    more_N = torch.expm1(d_N)
    kl = torch.sub(more_N, d_N, out=d_N).sum().clamp_(min=0.0)
    return Gap(more_N.add_(1.0), kl, torch.maximum(-low, high))


@dataclass(frozen=True, slots=True)
class Terms:
    """What the tokens of one micro-batch contribute."""

    loss: Tensor  # (): sum over tokens, to be divided by the number of trained tokens of the whole minibatch
    clipped: Tensor  # (): tokens whose clipped branch was the smaller one: they have no gradient
    ratio_N: Tensor  # theta over what the objective is anchored at, detached


def ppo(
    theta_N: Tensor, anchor_N: Tensor, advantage_N: Tensor, *, eps_clip: float, weight_N: Tensor | None = None
) -> Terms:
    """-weight * min(u A, clip(u, 1 - eps, 1 + eps) A) with u = theta / anchor (PPO; weighted: paper, eq. 5).

    By theta, as du = u dtheta: -weight * u A where the plain branch is the smaller one, else 0. The weight, which is
    never negative, goes into A at once.
    """
    with torch.no_grad():
        worth_N = advantage_N if weight_N is None else weight_N * advantage_N
        ratio_N = torch.sub(theta_N, anchor_N).exp_()
        gain_N = ratio_N * worth_N
        bounded_N = ratio_N.clamp(1 - eps_clip, 1 + eps_clip).mul_(worth_N)
        free_N = torch.le(gain_N, bounded_N, out=torch.empty_like(gain_N))  # 1 or 0; faster than from bool
        clipped = free_N.numel() - free_N.sum()
        loss = -torch.minimum(gain_N, bounded_N, out=bounded_N).sum()
        downhill_N = free_N.mul_(gain_N)
    return Terms(_Sloped.apply(theta_N, loss, downhill_N), clipped, ratio_N)  # type: ignore[no-untyped-call]


def decoupled_ppo(
    theta_N: Tensor, prox_N: Tensor, weight_N: Tensor, advantage_N: Tensor, *, eps_clip: float, cap: float | None
) -> Terms:
    """Decoupled PPO (paper, eq. 5): -(prox/behav) * min(u A, clip(u) A), u = theta / prox.

    The weight prox/behav (see `gap`) is a constant that is always there; `cap` clamps it from above.
    """
    if cap is not None:
        weight_N = weight_N.clamp(max=cap)
    return ppo(theta_N, prox_N, advantage_N, eps_clip=eps_clip, weight_N=weight_N)


class _Sloped(torch.autograd.Function):
    """A loss that is computed already, and minus its gradient by the one tensor that it is to reach."""

    @staticmethod
    def forward(ctx: Any, theta_N: Tensor, loss: Tensor, downhill_N: Tensor) -> Tensor:
        ctx.save_for_backward(downhill_N)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (downhill_N,) = ctx.saved_tensors
        return downhill_N * -gradients[0], None, None


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens that describe how far the learner is from the sampler; they add up over micro-batches."""

    n: int  # tokens
    kl: float  # as in Gap
    largest: float  # max |d|: a maximum, not a sum
    weight: float  # sum of exp(theta - behav)
    weight_squared: float


def mismatch(importance_N: Tensor, gap: Gap) -> Mismatch:
    """Statistics of one micro-batch; importance = exp(theta - behav). One transfer from the device."""
    exact_N = importance_N.double()  # so that the effective share is never above 1
    sums = torch.stack([gap.kl.double(), gap.largest.double(), exact_N.sum(), torch.dot(exact_N, exact_N)])
    kl, largest, weight, weight_squared = sums.tolist()
    return Mismatch(importance_N.numel(), kl, largest, weight, weight_squared)


def effective_share(weight: float, weight_squared: float, n: int) -> float:
    """Effective sample size over n: (sum w)^2 / (n sum w^2), 1 when all weights are equal."""
    return weight * weight / (n * weight_squared) if weight_squared > 0 else 0.0
