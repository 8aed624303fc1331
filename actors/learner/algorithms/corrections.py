"""Corrections: the weight of a token whose sampler was not the proximal policy.

d = proximal - sampler, in log-probs; the exact importance weight is w = exp(d). Every correction is one `Rule`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from actors.learner.algorithms.parts import Correction, Tokens, select
from areal_bus.config.learner import ActorConfig

LEAST_ENTROPY = 1e-6  # below it a distribution has one token, within rounding
MOST_LOG = 100.0  # of a weight, so that its square is finite


@dataclass(frozen=True, slots=True)
class Rule:
    """A weight, and what happens to one out of [lower, upper]."""

    level: str = "token"  # "sequence": one weight a trajectory, by `aggregate`
    action: str = "clamp"  # to the bounds; "mask": weight 0
    metric: str = "ratio"  # what is compared with the bounds; or another of METRICS
    aggregate: str = "mean"  # of d or of the metric over the trained tokens of a trajectory; or "sum", "max"
    lower: float | None = None
    upper: float | None = None


RULES = {
    "decoupled": Rule(),
    "tis": Rule(upper=2.0),
    "tis_sequence": Rule(level="sequence", aggregate="sum", upper=2.0),
    "icepop": Rule(action="mask", lower=0.5, upper=5.0),
    "kpop": Rule(action="mask", metric="binary_kl", upper=2.0),
    "entropy_scaled": Rule(action="mask", metric="entropy", upper=2.0),
    "vcpo": Rule(level="sequence", aggregate="sum", upper=8.0),
}


def rule_of(settings: ActorConfig, name: str) -> Rule:
    rule = RULES[name]
    if name == "decoupled":
        return replace(rule, action=settings.correction_action or "clamp", upper=settings.behav_imp_weight_cap)
    given = {key: getattr(settings, f"correction_{key}") for key in ("action", "metric", "aggregate")}
    given |= {"lower": settings.correction_lower, "upper": settings.correction_upper}
    return replace(rule, **{key: value for key, value in given.items() if value is not None})


@torch.no_grad()
def bounded_weight(tokens: Tokens, rule: Rule) -> Tensor:
    """(N,) weights. "ratio" at sequence level: exp(aggregate of d) for a whole trajectory; else each token's own w."""
    d_N = tokens.prox_N - tokens.behav_N
    measured_N = METRICS[rule.metric](tokens)
    if rule.level == "sequence":
        measured_N = select(aggregated(measured_N, tokens, rule.aggregate), tokens)
    if rule.metric == "ratio":
        measured_N = measured_N.exp()  # the mean of d is the geometric mean of w
    weight_N = measured_N if rule.metric == "ratio" else d_N.exp()
    if rule.action == "clamp":
        return weight_N.clamp(rule.lower, rule.upper) if (rule.lower, rule.upper) != (None, None) else weight_N
    is_kept_N = torch.ones_like(weight_N, dtype=torch.bool)
    if rule.lower is not None:
        is_kept_N &= measured_N >= rule.lower
    if rule.upper is not None:
        is_kept_N &= measured_N <= rule.upper
    return torch.where(is_kept_N, weight_N, 0.0)


def aggregated(values_N: Tensor, tokens: Tokens, how: str) -> Tensor:
    """(M,) over the trained tokens of each trajectory."""
    if how == "max":
        lowest_M = values_N.new_full((len(tokens.lengths_M),), -torch.inf)
        return lowest_M.scatter_reduce(0, tokens.sequences_N, values_N, "amax")
    return tokens.sequence_sum(values_N) if how == "sum" else tokens.sequence_mean(values_N)


def binary_kl(tokens: Tokens) -> Tensor:
    """The larger one of KL(p, q) and KL(q, p) between "this token" and "another one" under both policies (KPop)."""
    forward_N = _bernoulli_kl(tokens.prox_N, tokens.behav_N)
    return torch.maximum(forward_N, _bernoulli_kl(tokens.behav_N, tokens.prox_N))


def _bernoulli_kl(log_p_N: Tensor, log_q_N: Tensor) -> Tensor:
    """KL of Bernoulli(p) from Bernoulli(q), from log p and log q."""
    rest_p_N, rest_q_N = (torch.log(-torch.expm1(x.clamp(max=-1e-7))) for x in (log_p_N, log_q_N))
    return log_p_N.exp() * (log_p_N - log_q_N) + rest_p_N.exp() * (rest_p_N - rest_q_N)


def by_entropy(tokens: Tokens) -> Tensor:
    """|d| / H, with the entropy H of the current policy at the token, in nats."""
    if tokens.entropy_N is None:
        raise ValueError("missing entropies: the metric 'entropy' of a correction needs them of each trained token")
    return (tokens.prox_N - tokens.behav_N).abs() / tokens.entropy_N.clamp(min=LEAST_ENTROPY)


METRICS: dict[str, Callable[[Tokens], Tensor]] = {
    "ratio": lambda tokens: tokens.prox_N - tokens.behav_N,  # its log, until it is aggregated
    "k1": lambda tokens: tokens.behav_N - tokens.prox_N,
    "k2": lambda tokens: (tokens.prox_N - tokens.behav_N).square() / 2,
    "k3": lambda tokens: torch.expm1(tokens.prox_N - tokens.behav_N) - (tokens.prox_N - tokens.behav_N),
    "binary_kl": binary_kl,
    "entropy": by_entropy,
}


def decoupled(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """w (AReaL paper, eq. 5), unbounded, clamped or masked above behav_imp_weight_cap."""
    return bounded_weight(tokens, rule_of(settings, "decoupled"))


def tis(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """min(w, upper) by token: truncated importance sampling (Yao et al. 2025)."""
    return bounded_weight(tokens, rule_of(settings, "tis"))


def tis_sequence(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """min(product of w over the trained tokens, upper) for all tokens of a trajectory."""
    return bounded_weight(tokens, rule_of(settings, "tis_sequence"))


def icepop(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """w where it lies in [lower, upper], else 0 (IcePop, arXiv 2510.18855)."""
    return bounded_weight(tokens, rule_of(settings, "icepop"))


def kpop(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """w where the two-sided binary KL is at most `upper`, else 0 (KPop)."""
    return bounded_weight(tokens, rule_of(settings, "kpop"))


def entropy_scaled(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """w where |log w| / H is at most `upper`, else 0; H is the policy's entropy at the token."""
    return bounded_weight(tokens, rule_of(settings, "entropy_scaled"))


def vcpo(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """min(product of current / sampler, upper) for a whole trajectory, and lr * sqrt(ESS / n) (VCPO, arXiv 2602.17616).

    The product is over trained tokens. The ESS is of the minibatch's n products, unbounded.
    """
    return bounded_weight(replace(tokens, prox_N=tokens.logprobs_N.detach()), rule_of(settings, "vcpo"))


@torch.no_grad()
def trajectory_weights(tokens: Tokens) -> Tensor:
    """(M,) float64: the product of current / sampler over the trained tokens of each trajectory, unbounded."""
    return tokens.sequence_sum((tokens.logprobs_N - tokens.behav_N).double()).clamp(-MOST_LOG, MOST_LOG).exp()


def none(tokens: Tokens, settings: ActorConfig) -> Tensor:
    """1: the sampler's mismatch is ignored (naive PPO)."""
    return torch.ones_like(tokens.behav_N)


CORRECTIONS: dict[str, Correction] = {
    "decoupled": decoupled,
    "tis": tis,
    "tis_sequence": tis_sequence,
    "icepop": icepop,
    "kpop": kpop,
    "entropy_scaled": entropy_scaled,
    "vcpo": vcpo,
    "none": none,
}


@torch.no_grad()
def loglinear_prox(logprobs_N: Tensor, behav_N: Tensor, lags_N: Tensor) -> Tensor:
    """Proximal log-probs without a pass (A-3PO, arXiv 2512.06547): behav/lag + current (1 - 1/lag); lag 0: current."""
    alpha_N = torch.where(lags_N > 0, 1.0 / lags_N.clamp(min=1).to(behav_N.dtype), 0.0)
    return torch.lerp(logprobs_N.detach(), behav_N, alpha_N)


def second_moment_threshold(squared_N: Tensor, limit: float, total: Callable[[list[float]], list[float]]) -> float:
    """Largest t so that the mean of the values <= t, over all ranks, is at most `limit` (M2PO, arXiv 2510.01161).

    `squared_N`: (log-ratio)^2 of this rank's trained tokens; `total` sums over ranks. Tokens above are masked.
    """
    values_N = squared_N.double()

    def mean_up_to(bound: float) -> float:
        kept_N = values_N[values_N <= bound]
        n, first = total([float(len(kept_N)), float(kept_N.sum())])
        return first / n if n else 0.0

    low, high = limit, 1e6  # values up to the limit keep it by themselves; log-ratios stay under 1,000
    if mean_up_to(high) <= limit:
        return high
    for _ in range(64):
        middle = (low * high) ** 0.5 if low > 0 else high / 2
        low, high = (middle, high) if mean_up_to(middle) <= limit else (low, middle)
    return _below(low, squared_N.dtype)


def _below(bound: float, dtype: torch.dtype) -> float:
    """The largest number of the type that is at most `bound`: a comparison would round it, maybe up."""
    found = torch.tensor(bound, dtype=dtype)
    return float(found if float(found) <= bound else torch.nextafter(found, torch.zeros_like(found)))
