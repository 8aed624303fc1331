"""Per-token losses, their aggregation over a minibatch, and estimators of KL(pi, pi_ref). Pure: no I/O.

Each loss is a plain definition; autograd gives the gradient. A = advantage, u = exp(current - anchor) =
`tokens.ratio_N`. The correction's weight and the aggregation are applied afterwards. `fused.py` computes PPO's sum and
gradient analytically; a test holds it to `ppo`.

An aggregation is the weight of each token in the loss of a minibatch: the loss is the sum over all trained tokens of
weight * loss. Denominators are global: `Totals` counts over all micro-batches and ranks, so how a minibatch is cut
changes nothing. Names as in verl's `loss_agg_mode`.

KL estimators (Schulman, "Approximating KL divergence", 2020) give one number for each of N trained tokens, sampled from
pi, with r = log pi_ref - log pi. Nothing is clamped. As a loss, autograd differentiates the estimator at these tokens.
On data from pi, the mean of that gradient is stated with each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from actors.learner.algorithms.parts import Aggregation, Loss, Statistics, Tokens, Totals, select
from areal_bus.config.learner import ActorConfig


def clip_range(settings: ActorConfig) -> tuple[float, float]:
    """Bounds of the ratio; the upper one may be wider (DAPO's clip-higher, arXiv 2503.14476)."""
    higher = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
    return 1 - settings.eps_clip, 1 + higher


def ppo(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    """-min(u A, clip(u) A) (PPO, Schulman et al. 2017, eq. 7).

    With `c_clip` (dual clip, arXiv 1912.09729) at most c_clip |A| where A < 0: a large ratio cannot dominate.
    """
    return clipped(tokens.ratio_N, tokens.advantages_N, settings)


def clipped(ratio_N: Tensor, advantages_N: Tensor, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    low, high = clip_range(settings)
    free_N, bounded_N = -ratio_N * advantages_N, -ratio_N.clamp(low, high) * advantages_N
    losses_N = torch.maximum(free_N, bounded_N)
    is_clipped_N = bounded_N > free_N
    if settings.c_clip is not None:
        ceiling_N = -settings.c_clip * advantages_N
        is_over_N = (advantages_N < 0) & (losses_N > ceiling_N)
        losses_N = torch.where(is_over_N, ceiling_N, losses_N)
        is_clipped_N = is_clipped_N | is_over_N
    return losses_N, {"clip_share": is_clipped_N.to(losses_N.dtype).detach()}


def gspo(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    """PPO with the sequence ratio s = exp(mean over tokens of log u) (GSPO, arXiv 2507.18071).

    The value is s for all tokens of a trajectory, the gradient flows through each token's own log-prob (GSPO-token).
    The mean is over trained tokens: with the staleness policy `mask`, s leaves out the masked ones.
    """
    mean_N = select(tokens.sequence_mean(tokens.log_ratio_N.detach()), tokens)
    ratio_N = (tokens.logprobs_N - tokens.logprobs_N.detach() + mean_N).exp()
    return clipped(ratio_N, tokens.advantages_N, settings)


def gmpo(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    """-A exp(mean over tokens of clipped log u) (GMPO, arXiv 2507.20673): a geometric mean, clipped by token.

    A log-ratio is clipped to [-eps_clip, eps_clip_higher], and only in the direction of its advantage (paper: 0.4).
    The value is one number a trajectory, given to each of its tokens.
    """
    high = settings.eps_clip if settings.eps_clip_higher is None else settings.eps_clip_higher
    log_ratio_N = tokens.log_ratio_N
    bounded_N = torch.where(
        tokens.advantages_N > 0, log_ratio_N.clamp(max=high), log_ratio_N.clamp(min=-settings.eps_clip)
    )  # without an advantage nothing is lost by either
    mean_M = tokens.sequence_mean(bounded_N)
    losses_N = -select(mean_M.exp(), tokens) * tokens.advantages_N
    return losses_N, {"clip_share": (bounded_N != log_ratio_N).to(losses_N.dtype).detach()}


def cispo(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    """-clip(u) A log pi, no gradient through clip(u) (CISPO, arXiv 2506.13585): no token loses its gradient."""
    low, high = clip_range(settings)
    ratio_N = tokens.ratio_N.detach()
    weight_N = ratio_N.clamp(low, high)
    losses_N = -weight_N * tokens.advantages_N * tokens.logprobs_N
    return losses_N, {"clip_share": (weight_N != ratio_N).to(losses_N.dtype)}


def sapo(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
    """-f(u) A, f(u) = 4 / tau sigmoid(tau (u - 1)): a soft gate instead of a clip (SAPO, arXiv 2511.20347).

    tau is the first of sapo_tau where A > 0, else the second.
    """
    advantages_N, ratio_N = tokens.advantages_N, tokens.ratio_N
    positive, negative = ratio_N.new_tensor(settings.sapo_tau)
    tau_N = torch.where(advantages_N > 0, positive, negative)
    return -4 / tau_N * torch.sigmoid(tau_N * (ratio_N - 1)) * advantages_N, {}


def reinforce(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """-A log pi (Williams 1992)."""
    return -tokens.advantages_N * tokens.logprobs_N


def oapl(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """(log of current / sampler - A / beta)^2 beta / 2 of a whole trajectory (OAPL, arXiv 2602.19362, eq. 3).

    Log-ratios are sums over trained tokens. beta = 1 / reward_scaling (beta_2 of A*-PO): `advantages_N` is A / beta.
    The paper's square is divided by 2 beta: where the policy is the sampler the gradient is that of `reinforce`. The
    value is one number a trajectory, given to each of its tokens.
    """
    log_ratio_M = tokens.sequence_sum(tokens.logprobs_N - tokens.behav_N)
    losses_M = (log_ratio_M - tokens.sequence_mean(tokens.advantages_N)).square() / (2 * settings.reward_factor)
    return select(losses_M, tokens)


LOSSES: dict[str, Loss] = {
    "ppo": ppo,
    "gspo": gspo,
    "gmpo": gmpo,
    "cispo": cispo,
    "sapo": sapo,
    "reinforce": reinforce,
    "oapl": oapl,
}


def token_mean(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / tokens of the minibatch: every token counts alike (DAPO, arXiv 2503.14476)."""
    return _alike(lengths_M, totals.n_tokens)


def seq_mean_token_mean(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / (trajectories * tokens of this one): every trajectory counts alike (GRPO, DeepSeekMath, eq. 3)."""
    return 1 / (totals.n_sequences * lengths_M.double())


def seq_mean_token_sum(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / trajectories (AReaL paper, eq. 2 and 5: a sum over tokens, an expectation over trajectories)."""
    return _alike(lengths_M, totals.n_sequences)


def seq_mean_token_sum_norm(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / (trajectories * aggregation_length): a constant instead of each length (Dr. GRPO, arXiv 2503.20783)."""
    if settings.aggregation_length is None:
        raise ValueError("seq-mean-token-sum-norm needs actor.aggregation_length")
    return _alike(lengths_M, totals.n_sequences * settings.aggregation_length)


def _alike(lengths_M: Tensor, denominator: float) -> Tensor:
    return torch.full(lengths_M.shape, 1 / denominator, dtype=torch.float64, device=lengths_M.device)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


Estimate = Callable[[Tensor, Tensor], Tensor]  # (logprobs_N, reference_N) -> (N,)


def k1(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """-r: unbiased, of large variance. Its gradient, that of log pi, is 0 on average: it is no loss."""
    return logprobs_N - reference_N


def k2(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """r^2 / 2: biased, of low variance. Its gradient, -r grad log pi, is on average that of KL(pi, pi_ref)."""
    return (reference_N - logprobs_N).square() / 2


def k3(logprobs_N: Tensor, reference_N: Tensor) -> Tensor:
    """exp(r) - 1 - r: unbiased, never negative (GRPO). Its gradient, (1 - exp(r)) grad log pi, is on average that of
    KL(pi_ref, pi), the divergence in the other direction.
    """
    r_N = reference_N - logprobs_N
    return torch.expm1(r_N) - r_N


KL_ESTIMATORS: dict[str, Estimate] = {"k1": k1, "k2": k2, "k3": k3}
