"""PPO and decoupled PPO by an analytic gradient, and statistics of log-ratios. `losses.ppo` is the definition.

N trained tokens; log-probs: `theta` current, `prox` just before the update, `behav` recorded by the sampler.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from areal_cpu import loss as kernels


@dataclass(frozen=True, slots=True)
class LogRatio:
    """Log-ratio of the learner before its update to the sampler. Detached."""

    weight_N: Tensor  # exp(prox - behav)
    kl: Tensor  # (): sum of k3 = exp(d) - 1 - d with d = prox - behav: an estimate of KL(behav || prox)
    largest: Tensor  # (): max |d|


def gap(prox_N: Tensor, behav_N: Tensor) -> LogRatio:
    """Importance weights and KL estimate, in the precision of the inputs. `expm1` keeps small values of k3."""
    apart = kernels.log_ratio if kernels.applies(prox_N, behav_N) else _log_ratio
    return LogRatio(*apart(prox_N, behav_N))


@torch.no_grad()
def _log_ratio(prox_N: Tensor, behav_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The torch version of the C kernel."""
    d_N = prox_N - behav_N
    if d_N.numel() == 0:
        return d_N, d_N.sum(), d_N.sum()
    low, high = torch.aminmax(d_N)
    weight_N, k3_N = torch.exp(d_N), torch.expm1(d_N).sub_(d_N)
    return weight_N, k3_N.sum().clamp_(min=0.0), torch.maximum(-low, high)


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Loss terms of the tokens of one micro-batch."""

    loss: Tensor  # (): sum over tokens, to be divided by the number of trained tokens of the whole minibatch
    clipped: Tensor  # (): number of tokens whose clipped branch is smaller; their gradient is 0
    ratio_N: Tensor  # exp(theta - anchor), detached


def ppo(
    theta_N: Tensor,
    anchor_N: Tensor,
    advantage_N: Tensor,
    *,
    eps_clip: float,
    eps_clip_higher: float | None = None,
    weight_N: Tensor | None = None,
) -> LossTerms:
    """-weight * min(u A, clip(u, 1 - eps, 1 + eps) A) with u = theta / anchor (PPO; weighted: paper, eq. 5).

    Gradient with respect to theta (du = u dtheta): -weight * u A where the unclipped branch is smaller, else 0. The
    weight is never negative, so it is multiplied into A first.
    """
    low, high = 1 - eps_clip, 1 + (eps_clip if eps_clip_higher is None else eps_clip_higher)
    weights = () if weight_N is None else (weight_N,)
    clipped = kernels.clipped if kernels.applies(theta_N, anchor_N, advantage_N, *weights) else _clipped
    loss, n_clipped, ratio_N, grad_N = clipped(theta_N, anchor_N, advantage_N, weight_N, low=low, high=high)
    return LossTerms(attach_grad(theta_N, loss, grad_N), n_clipped, ratio_N)


@torch.no_grad()
def _clipped(
    theta_N: Tensor, anchor_N: Tensor, advantage_N: Tensor, weight_N: Tensor | None, *, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The torch version of the C kernel."""
    weighted_advantage_N = advantage_N if weight_N is None else weight_N * advantage_N
    ratio_N = torch.sub(theta_N, anchor_N).exp_()
    gain_N = ratio_N * weighted_advantage_N
    bounded_N = ratio_N.clamp(low, high).mul_(weighted_advantage_N)
    free_N = torch.le(gain_N, bounded_N, out=torch.empty_like(gain_N))  # 1 or 0; faster than from bool
    n_clipped = free_N.numel() - free_N.sum()
    loss = -torch.minimum(gain_N, bounded_N, out=bounded_N).sum()
    return loss, n_clipped, ratio_N, free_N.mul_(gain_N).neg_().to(theta_N.dtype)


def decoupled_ppo(
    theta_N: Tensor,
    prox_N: Tensor,
    weight_N: Tensor,
    advantage_N: Tensor,
    *,
    eps_clip: float,
    cap: float | None,
    eps_clip_higher: float | None = None,
) -> LossTerms:
    """Decoupled PPO (AReaL paper, eq. 5): -(prox/behav) * min(u A, clip(u) A), u = theta / prox.

    The weight prox/behav carries no gradient; `cap` clamps it from above.
    """
    if cap is not None:
        weight_N = weight_N.clamp(max=cap)
    return ppo(theta_N, prox_N, advantage_N, eps_clip=eps_clip, eps_clip_higher=eps_clip_higher, weight_N=weight_N)


def attach_grad(theta_N: Tensor, loss: Tensor, grad_N: Tensor) -> Tensor:
    """The loss with a known gradient: a dot product with theta, whose value is replaced. Cheaper than a Function."""
    carrier = torch.dot(theta_N, grad_N)
    carrier.detach().copy_(loss)
    return carrier


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Sums over tokens that measure the mismatch of learner and sampler; they add up over micro-batches."""

    n: int  # tokens
    kl: float  # as in LogRatio
    largest: float  # max |d|: a maximum, not a sum
    weight: float  # sum of exp(theta - behav)
    weight_squared: float


def mismatch(importance_N: Tensor, gap: LogRatio) -> Mismatch:
    """Statistics of one micro-batch; importance = exp(theta - behav). One transfer from the device."""
    if kernels.applies(importance_N):
        weight, weight_squared = kernels.weight_sums(importance_N)
        return Mismatch(importance_N.numel(), float(gap.kl), float(gap.largest), weight, weight_squared)
    exact_N = importance_N.double()  # float64: the effective share stays at most 1
    sums = torch.stack([gap.kl.double(), gap.largest.double(), exact_N.sum(), torch.dot(exact_N, exact_N)])
    kl, largest, weight, weight_squared = sums.tolist()
    return Mismatch(importance_N.numel(), kl, largest, weight, weight_squared)


def effective_share(weight: float, weight_squared: float, n: int) -> float:
    """Effective sample size over n: (sum w)^2 / (n sum w^2); 1 when all weights are equal, never above."""
    return min(weight * weight / (n * weight_squared), 1.0) if weight_squared > 0 else 0.0  # NaN stays
