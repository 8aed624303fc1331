"""Advantage estimators: from the rewards of groups to one number a trajectory. Pure. M trajectories, G groups.

The journal has rewards before shaping. A trajectory whose tokens are all masked counts in its group's baseline.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.algorithms.parts import Advantage, Trajectories, needs
from areal_bus.config.learner import ActorConfig


def shape_rewards(
    rewards_M: Tensor,
    lengths_M: Tensor,
    zeroed_M: Tensor,
    settings: ActorConfig,
    *,
    max_new_tokens: Tensor | int,
    longest_M: Tensor | None = None,
) -> Tensor:
    """(M,) float64, in this order: zero, bias, scale, clip, overlong and length penalties.

    `lengths_M`: sampled tokens; `zeroed_M`: bool, cut off by the length limit and worth nothing. `max_new_tokens`: that
    limit, one number, or (M,) where stages have different ones. `longest_M`: of the longest turn, for the overlong
    penalty, as the limit is that of one turn; None: each has one.
    """
    shaped = torch.where(zeroed_M, 0.0, rewards_M.double())
    shaped = (shaped + settings.reward_bias) * settings.reward_factor
    if settings.reward_clip is not None:
        shaped = shaped.clamp(-settings.reward_clip, settings.reward_clip)
    lengths = lengths_M.double()
    if settings.overlong_tokens:
        of_turn = lengths if longest_M is None else longest_M.double()
        shaped = shaped + overlong_penalty(of_turn, settings, max_new_tokens=max_new_tokens)
    if settings.length_penalty:
        shaped = shaped - settings.length_penalty * lengths / max_new_tokens
    return shaped


def overlong_penalty(lengths_M: Tensor, settings: ActorConfig, *, max_new_tokens: Tensor | int) -> Tensor:
    """0 up to max_new_tokens - overlong_tokens, then down to -overlong_penalty_factor (DAPO, arXiv 2503.14476)."""
    over_M = lengths_M - (max_new_tokens - settings.overlong_tokens)
    return -settings.overlong_penalty_factor * (over_M / settings.overlong_tokens).clamp(0.0, 1.0)


FIELD_ROUNDING = 1e-6  # the same of steps: fields of a workflow are float32
VALUE_BETA = 0.5  # of the optimal value, for rewards of about 0 to 1 (beta_1 of A*-PO)
ROUNDING = 1e-9  # a standard deviation below this share of the mean is rounding error


@dataclass(frozen=True, slots=True)
class Groups:
    """Sums over the trajectories of each group."""

    index_M: Tensor  # int64: 0 .. G - 1
    count_G: Tensor

    def mean(self, values_M: Tensor) -> Tensor:
        """(M,) mean over the group of each trajectory."""
        return self.spread(self.sum(values_M) / self.count_G)

    def sum(self, values_M: Tensor) -> Tensor:
        return torch.zeros_like(self.count_G).index_add(0, self.index_M, values_M)

    def spread(self, values_G: Tensor) -> Tensor:
        return values_G[self.index_M]


def groups_of(trajectories: Trajectories, least: int = 2) -> Groups:
    """Raises ValueError for a group of fewer than `least` trajectories, unless it may be of a role."""
    _, index_M, count_G = torch.unique(trajectories.groups_M, return_inverse=True, return_counts=True)
    if len(count_G) and bool((count_G < least).any()) and not trajectories.has_roles:
        raise ValueError(f"a group baseline needs at least {least} samples: group sizes {count_G.tolist()}")
    return Groups(index_M, count_G.to(trajectories.rewards_M.dtype))


def has_signal(trajectories: Trajectories) -> Tensor:
    """(M,) bool: the rewards of the trajectory's group differ."""
    rewards = trajectories.rewards_M
    groups = groups_of(trajectories, least=1)
    empty_G = torch.zeros_like(groups.count_G)
    low_G = empty_G.scatter_reduce(0, groups.index_M, rewards, "amin", include_self=False)
    high_G = empty_G.scatter_reduce(0, groups.index_M, rewards, "amax", include_self=False)
    return groups.spread(high_G > low_G)


def grpo(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """(r - mean) / (std + eps) over the group (DeepSeekMath, eq. 3); the variance by n - 1, or by n."""
    groups = groups_of(trajectories)
    centred_M = trajectories.rewards_M - groups.mean(trajectories.rewards_M)
    n_G = groups.count_G - 1 if settings.std_unbiased else groups.count_G
    variance_G = groups.sum(centred_M.square()) / n_G
    return centred_M / (groups.spread(variance_G.sqrt()) + settings.std_eps)


def grpo_process(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """By token the normalised rewards of its own step, or turn, and all later ones (DeepSeekMath, 4.1.3).

    arXiv 2402.03300. Rewards of tokens and turns: the workflow's field `token_reward`.
    """
    return trajectories.rewards_M  # `by_step` makes the advantages


def by_step(rewards: Sequence[Tensor], ends: Sequence[Tensor], settings: ActorConfig) -> list[Tensor]:
    """(K,) float64 for each sequence of one group: (r - mean) / (std + eps) over all steps, summed from a token's own
    step to the last one. `rewards`: (K,) of each sampled token; `ends`: (K,) bool, the last token of each step.
    """
    steps_S = torch.cat([values_K[end_K] for values_K, end_K in zip(rewards, ends, strict=True)])
    mean = steps_S.mean()
    deviation = (steps_S - mean).square().sum().div(max(len(steps_S) - settings.std_unbiased, 1)).sqrt()
    if deviation <= FIELD_ROUNDING * mean.abs():
        return [torch.zeros_like(values_K) for values_K in rewards]
    scaled = ((values_K - mean) / (deviation + settings.std_eps) for values_K in rewards)
    return [torch.where(end_K, one, 0.0).flip(0).cumsum(0).flip(0) for one, end_K in zip(scaled, ends, strict=True)]


def dr_grpo(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r - mean over the group (Dr. GRPO, arXiv 2503.20783): no division by the deviation."""
    return trajectories.rewards_M - groups_of(trajectories).mean(trajectories.rewards_M)


def rloo(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r - mean of the other samples of the group (RLOO, arXiv 2402.14740)."""
    groups = groups_of(trajectories)
    centred_M = trajectories.rewards_M - groups.mean(trajectories.rewards_M)
    return centred_M * groups.spread(groups.count_G / (groups.count_G - 1))


def opo(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r - length-weighted mean over the group (OPO, arXiv 2505.23585)."""
    groups = groups_of(trajectories)
    lengths_M = trajectories.lengths_M.to(trajectories.rewards_M.dtype)
    baseline_M = groups.mean(lengths_M * trajectories.rewards_M) / groups.mean(lengths_M)
    return trajectories.rewards_M - baseline_M


def sampler_weight(streams: Mapping[str, Tensor], settings: ActorConfig) -> Tensor:
    """(n_trained,) the log of policy / sampler, summed over the trained tokens: the same number for each of them."""
    gap_N = streams["prox"] - streams["behav"]
    return gap_N.sum().expand_as(gap_N)


@needs("prox", log_weight=sampler_weight)
def opo_offpolicy(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r - mean over the group, weighted by length * (policy / sampler of the trajectory)^2.

    VCPO's minimum-variance baseline (arXiv 2602.17616) has the gradient's squared norm where this has OPO's length.
    """
    groups = groups_of(trajectories)
    log_w_M = trajectories.streams["log_weight"]
    most_G = torch.full_like(groups.count_G, -torch.inf).scatter_reduce(0, groups.index_M, log_w_M, "amax")
    weights_M = (2 * (log_w_M - groups.spread(most_G))).exp() * trajectories.lengths_M
    baseline_M = groups.mean(weights_M * trajectories.rewards_M) / groups.mean(weights_M)
    return trajectories.rewards_M - baseline_M


def oapl(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r - log mean exp(r / 0.5) / 2 over the group: the optimal advantage (OAPL, arXiv 2602.19362).

    0.5 is VALUE_BETA (A*-PO, arXiv 2505.20686). r is the reward without reward_scaling, which multiplies the result.
    """
    groups, scale = groups_of(trajectories), settings.reward_factor * VALUE_BETA
    rewards_M = trajectories.rewards_M / scale
    most_G = torch.full_like(groups.count_G, -torch.inf).scatter_reduce(0, groups.index_M, rewards_M, "amax")
    below_M = rewards_M - groups.spread(most_G)
    return scale * (below_M - groups.mean(below_M.exp()).log())


def none(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """r, without a baseline (REINFORCE; the AReaL paper with normalize_batch)."""
    return trajectories.rewards_M


def gae(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """By token from r and the critic's values (GAE), in `critic.py`."""
    return trajectories.rewards_M


def distill(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
    """By token log pi_teacher - log pi (on-policy distillation); the reward is not used."""
    return torch.zeros_like(trajectories.rewards_M)


@dataclass(frozen=True, slots=True)
class Estimator:
    """An estimator, and what follows it."""

    estimate: Advantage
    has_group_baseline: bool = True  # then a group without signal has advantage exactly 0
    normalization: str = ""  # over the trained tokens of the batch: "" as configured, "mean" (centre), "std" (both)
    is_by_step: bool = False  # `by_step` makes the advantages of each token


ESTIMATORS: dict[str, Estimator] = {
    "grpo": Estimator(grpo),
    "grpo_process": Estimator(grpo_process, is_by_step=True),
    "dr_grpo": Estimator(dr_grpo),
    "rloo": Estimator(rloo),
    "opo": Estimator(opo),
    "opo_offpolicy": Estimator(opo_offpolicy),
    "oapl": Estimator(oapl),
    "reinforce": Estimator(none, False, "mean"),  # the batch's mean is the baseline
    "reinforce_plus_plus": Estimator(none, False, "std"),  # REINFORCE++ (arXiv 2501.03262)
    "reinforce_plus_plus_baseline": Estimator(rloo, True, "std"),  # its form with a leave-one-out baseline
    "gae": Estimator(gae, False),
    "none": Estimator(none, False),
    "distill": Estimator(distill, False),
}


def group_advantages(trajectories: Trajectories, estimator: Estimator, settings: ActorConfig) -> tuple[Tensor, Tensor]:
    """(advantages_M float32, signal_M: a group's rewards differ), before normalization. ValueError: not finite."""
    if not bool(torch.isfinite(trajectories.rewards_M).all()):
        raise ValueError("rewards are finite numbers: a NaN or infinite one reached the advantages")
    if not len(trajectories.rewards_M):
        return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    signal_M = has_signal(trajectories)
    values_M = estimator.estimate(trajectories, settings)
    if estimator.has_group_baseline:
        values_M = torch.where(signal_M, values_M, 0.0)
    return values_M.float(), signal_M


def normalize(
    advantages_M: Tensor,
    weights_M: Tensor,
    counted_M: Tensor,
    total: Callable[[list[float]], list[float]],
    *,
    unbiased: bool = True,
    eps: float = 1e-6,
    divide: bool = True,
) -> Tensor:
    """Advantages with mean 0 and (`divide`) deviation 1 over the batch's trained tokens.

    `weights_M`: trained tokens (I2); `counted_M`: others get 0; `total` sums over the ranks. Equal values all get 0.
    """
    weights = weights_M.double() * counted_M
    values = advantages_M.double()
    n, first = total([float(weights.sum()), float((weights * values).sum())])
    if n == 0:
        return torch.zeros_like(advantages_M)
    mean = first / n
    (second,) = total([float((weights * (values - mean).square()).sum())])
    deviation = (second / max(n - 1 if unbiased else n, 1.0)) ** 0.5
    if deviation <= ROUNDING * abs(mean):
        return torch.zeros_like(advantages_M)
    scaled = (values - mean) / (deviation + eps if divide else 1.0)
    return torch.where(counted_M, scaled, 0.0).float()


def generalized_advantages(
    rewards_T: Tensor, values_T: Tensor, after: float = 0.0, *, discount: float, lam: float
) -> tuple[Tensor, Tensor]:
    """(advantages_T, returns_T) of one trajectory (GAE, Schulman et al. 2016, eq. 16). T sampled tokens, in order.

    `rewards_T`: the reward that follows each token. `after`: the value after the last. returns = advantages + values.
    Masked tokens take part: their values bootstrap those before them; the caller trains none of them.
    """
    advantages = torch.zeros_like(values_T)
    following = values_T.new_tensor(after)
    running = values_T.new_zeros(())
    for t in range(len(values_T) - 1, -1, -1):
        delta = rewards_T[t] + discount * following - values_T[t]
        running = delta + discount * lam * running
        advantages[t] = running
        following = values_T[t]
    return advantages, advantages + values_T
