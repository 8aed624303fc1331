"""Rewards of groups into advantages; pure, knows nothing of tokens' log-probs or ranks.

Shapes: N trajectories, G groups. A trajectory whose tokens are all masked still counts in its group's baseline.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6


def group_advantages(rewards_N: Tensor, groups_N: Tensor, *, kind: str) -> tuple[Tensor, Tensor]:
    """(advantages_N float32, signal_N bool): signal is False where all rewards of the group are equal.

    "grpo": (r - mean) / (std + 1e-6) over the group, std of the population (DeepSeekMath, eq. 3).
    "rloo": r - mean of the others (Ahmadian et al. 2024). Without signal the advantage is exactly 0.
    """
    rewards = rewards_N.to(torch.float64)
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError("rewards are finite numbers: a NaN or infinite one reached the advantages")
    if rewards.numel() == 0:
        return torch.zeros(0), torch.zeros(0, dtype=torch.bool)
    group_ids, index_N = torch.unique(groups_N, return_inverse=True)
    zeros = rewards.new_zeros(group_ids.numel())
    count_G = zeros.index_add(0, index_N, torch.ones_like(rewards))
    if bool((count_G < 2).any()):
        raise ValueError(f"a group baseline needs at least 2 samples: group sizes {count_G.int().tolist()}")
    low_G = zeros.scatter_reduce(0, index_N, rewards, "amin", include_self=False)
    high_G = zeros.scatter_reduce(0, index_N, rewards, "amax", include_self=False)
    signal_N = (high_G > low_G)[index_N]
    centred = rewards - (zeros.index_add(0, index_N, rewards) / count_G)[index_N]
    if kind == "grpo":
        variance_G = zeros.index_add(0, index_N, centred.square()) / count_G
        values = centred / (variance_G.sqrt()[index_N] + EPS)
    elif kind == "rloo":
        values = centred * (count_G / (count_G - 1))[index_N]
    else:
        raise ValueError(f'an advantage is "grpo" or "rloo": {kind!r}')
    return torch.where(signal_N, values, 0.0).float(), signal_N


def normalize(
    advantages_N: Tensor, weights_N: Tensor, signal_N: Tensor, total: Callable[[list[float]], list[float]]
) -> Tensor:
    """Advantages with mean 0 and deviation 1 over all trained tokens of the global batch.

    `weights_N` are the trained tokens of each trajectory, so that masked tokens enter no statistic (I2). Groups without
    signal take no part and stay 0. `total` adds up over all ranks.
    """
    weights = weights_N.double() * signal_N
    values = advantages_N.double()
    n, first = total([float(weights.sum()), float((weights * values).sum())])
    if n == 0:
        return advantages_N
    mean = first / n
    (second,) = total([float((weights * (values - mean).square()).sum())])
    scaled = (values - mean) / ((second / n) ** 0.5 + EPS)
    return torch.where(signal_N, scaled, 0.0).float()
