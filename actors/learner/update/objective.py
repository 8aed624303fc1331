"""The loss of one micro-batch, by the parts of the configured algorithm, and its statistics.

Shapes: N trained tokens of the micro-batch, M trajectories.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from actors.learner.algorithms.corrections import loglinear_prox, trajectory_weights
from actors.learner.algorithms.fused import LogRatio, decoupled_ppo, gap, ppo
from actors.learner.algorithms.losses import KL_ESTIMATORS
from actors.learner.algorithms.parts import Streams, Tokens, Totals, select
from actors.learner.algorithms.registry import BUILTIN_STATISTICS, Algorithm, split
from areal_bus.config.algorithms import correction_of, kl_estimator_of


@dataclass(frozen=True, slots=True)
class MicroBatchTokens:
    """Inputs of the loss of a micro-batch, besides the log-probs of the forward pass."""

    behav_N: Tensor
    advantages_N: Tensor
    lags_N: Tensor
    sequences_N: Tensor
    lengths_M: Tensor
    streams: Streams = field(default_factory=Streams)  # by name; without "prox" if it was not computed before
    weights_N: Tensor | None = None  # within an episode, see Item.weights; None: all 1
    apart_N: Tensor | None = None  # divergences from the teacher, with gradient


@dataclass(frozen=True, slots=True)
class MicroBatchLoss:
    """A loss with its gradient, and sums over tokens."""

    loss: Tensor  # (): already divided by the denominators of the whole minibatch
    value: float  # of the loss without the bonus terms of `extra_terms`
    n_clipped: float
    importance_N: Tensor  # exp(current - sampler), detached
    log_ratio: LogRatio  # of the learner before the update to the sampler
    statistics: dict[str, float]  # sums of the user's statistics
    weights_M: Tensor | None = None  # of the trajectories, where they scale the learning rate


def micro_batch_loss(
    algorithm: Algorithm,
    part: MicroBatchTokens,
    logprobs_N: Tensor,
    entropy_N: Tensor | None,
    totals: Totals,
    *,
    m2_bound: float | None = None,
) -> MicroBatchLoss:
    """`m2_bound`: tokens with a larger (prox - behav)^2 are masked."""
    before_N = part.streams.get("prox", logprobs_N.detach())
    log_ratio = gap(before_N, part.behav_N)
    if algorithm.is_fused and algorithm.settings.prox_logp_method == "recompute":
        return _fused(algorithm, part, logprobs_N, before_N, log_ratio, totals)
    tokens = tokens_of(algorithm, part, logprobs_N, before_N, entropy_N)
    losses_N, statistics = split(algorithm.loss(tokens, algorithm.settings))
    weight_N = algorithm.correction(tokens, algorithm.settings)
    if m2_bound is not None:
        weight_N = torch.where((tokens.prox_N - tokens.behav_N).square() <= m2_bound, weight_N, 0.0)
    losses_N = losses_N * weight_N
    share_M = algorithm.aggregation(part.lengths_M, totals, algorithm.settings)
    share_N = select(share_M, tokens).to(losses_N.dtype)
    if part.weights_N is not None:
        share_N = share_N * part.weights_N
    value = float((losses_N.detach() * share_N).sum())
    loss = (share_N * (losses_N + extra_terms(algorithm, part, logprobs_N, entropy_N))).sum()
    return MicroBatchLoss(
        loss,
        value,
        float(statistics["clip_share"].sum()) if "clip_share" in statistics else 0.0,
        (logprobs_N.detach() - part.behav_N).exp(),
        log_ratio,
        {name: float(values.sum()) for name, values in statistics.items() if name not in BUILTIN_STATISTICS},
        trajectory_weights(tokens) if correction_of(algorithm.settings) == "vcpo" else None,
    )


def tokens_of(
    algorithm: Algorithm, part: MicroBatchTokens, logprobs_N: Tensor, before_N: Tensor, entropy_N: Tensor | None = None
) -> Tokens:
    """With the proximal policy and the anchor that the settings choose."""
    settings = algorithm.settings
    if settings.prox_logp_method == "loglinear":
        prox_N = anchor_N = loglinear_prox(logprobs_N, part.behav_N, part.lags_N)
    elif settings.recompute_logprobs:
        prox_N = anchor_N = before_N
    else:
        prox_N = anchor_N = part.behav_N
    return Tokens(
        logprobs_N=logprobs_N,
        anchor_N=anchor_N,
        prox_N=prox_N,
        behav_N=part.behav_N,
        advantages_N=part.advantages_N,
        lags_N=part.lags_N,
        sequences_N=part.sequences_N,
        lengths_M=part.lengths_M,
        streams=part.streams,
        entropy_N=None if entropy_N is None else entropy_N.detach(),
    )


def extra_terms(algorithm: Algorithm, part: MicroBatchTokens, logprobs_N: Tensor, entropy_N: Tensor | None) -> Tensor:
    """(N,) terms beside the surrogate loss; no correction weighs them."""
    extra_N = torch.zeros_like(logprobs_N)
    if algorithm.settings.entropy_coef and entropy_N is not None:
        extra_N = extra_N - algorithm.settings.entropy_coef * entropy_N
    if "reference" in part.streams and algorithm.settings.kl_in == "loss":
        estimate = KL_ESTIMATORS[kl_estimator_of(algorithm.settings)]
        extra_N = extra_N + algorithm.settings.kl_ctl * estimate(logprobs_N, part.streams["reference"])
    if part.apart_N is not None:
        extra_N = extra_N + (algorithm.settings.distill_coef or 1.0) * part.apart_N
    return extra_N


def _fused(
    algorithm: Algorithm,
    part: MicroBatchTokens,
    logprobs_N: Tensor,
    before_N: Tensor,
    log_ratio: LogRatio,
    totals: Totals,
) -> MicroBatchLoss:
    """PPO and decoupled PPO by the analytic gradient."""
    settings, advantages_N = algorithm.settings, part.advantages_N
    low, high = settings.eps_clip, settings.eps_clip_higher
    if correction_of(settings) == "decoupled":
        weight_N, cap = log_ratio.weight_N, settings.behav_imp_weight_cap
        terms = decoupled_ppo(logprobs_N, before_N, weight_N, advantages_N, eps_clip=low, eps_clip_higher=high, cap=cap)
        importance_N = terms.ratio_N * weight_N
    elif settings.recompute_logprobs:
        terms = ppo(logprobs_N, before_N, advantages_N, eps_clip=low, eps_clip_higher=high)
        importance_N = terms.ratio_N * log_ratio.weight_N
    else:
        terms = ppo(logprobs_N, part.behav_N, advantages_N, eps_clip=low, eps_clip_higher=high)
        importance_N = terms.ratio_N
    loss = terms.loss / totals.n_tokens
    return MicroBatchLoss(loss, float(loss.detach()), float(terms.clipped), importance_N, log_ratio, {})
