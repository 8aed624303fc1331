"""Computes advantages from the rewards of a group. Pure: no I/O.

Shapes: N trajectories, G groups. A trajectory whose tokens are all masked still counts in its group's baseline.
"""

from collections.abc import Callable

import torch
from torch import Tensor

EPS = 1e-6
ROUNDING = 1e-9  # a standard deviation below this share of the mean is rounding error


def group_advantages(
    rewards_N: Tensor, groups_N: Tensor, *, kind: str, unbiased: bool = True, eps: float = EPS
) -> tuple[Tensor, Tensor]:
    """(advantages_N float32, signal_N bool): signal is False where all rewards of the group are equal.

    "none": r, also in groups without signal (the paper: the only baseline is that of the batch, see `normalize`).

    "grpo": (r - mean) / (std + eps) over the group (DeepSeekMath, eq. 3); `unbiased`: the variance by n - 1, else by n.
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
    if kind != "none" and bool((count_G < 2).any()):
        raise ValueError(f"a group baseline needs at least 2 samples: group sizes {count_G.int().tolist()}")
    low_G = zeros.scatter_reduce(0, index_N, rewards, "amin", include_self=False)
    high_G = zeros.scatter_reduce(0, index_N, rewards, "amax", include_self=False)
    signal_N = (high_G > low_G)[index_N]
    if kind == "none":
        return rewards.float(), signal_N
    centred = rewards - (zeros.index_add(0, index_N, rewards) / count_G)[index_N]
    if kind == "grpo":
        variance_G = zeros.index_add(0, index_N, centred.square()) / (count_G - 1 if unbiased else count_G)
        values = centred / (variance_G.sqrt()[index_N] + eps)
    elif kind == "rloo":
        values = centred * (count_G / (count_G - 1))[index_N]
    else:
        raise ValueError(f'an advantage is "grpo", "rloo" or "none": {kind!r}')
    return torch.where(signal_N, values, 0.0).float(), signal_N


def normalize(
    advantages_N: Tensor,
    weights_N: Tensor,
    counted_N: Tensor,
    total: Callable[[list[float]], list[float]],
    *,
    unbiased: bool = True,
    eps: float = EPS,
) -> Tensor:
    """Advantages with mean 0 and standard deviation 1 over all trained tokens of the global batch.

    `weights_N`: trained tokens of each trajectory, so that masked tokens enter no statistic (I2). `counted_N`:
    trajectories that take part; the others get 0. If all values are equal, all get 0. `total` sums over the ranks.
    """
    weights = weights_N.double() * counted_N
    values = advantages_N.double()
    n, first = total([float(weights.sum()), float((weights * values).sum())])
    if n == 0:
        return torch.zeros_like(advantages_N)
    mean = first / n
    (second,) = total([float((weights * (values - mean).square()).sum())])
    deviation = (second / max(n - 1 if unbiased else n, 1.0)) ** 0.5
    if deviation <= ROUNDING * abs(mean):
        return torch.zeros_like(advantages_N)
    scaled = (values - mean) / (deviation + eps)
    return torch.where(counted_N, scaled, 0.0).float()
