"""Seeded trajectories in padded form, the same for every side. Imports torch only.

Shapes: B trajectories in groups of GROUP, L positions.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

B, L, GROUP = 24, 17, 4
EPS, EPS_HIGHER, DUAL = 0.2, 0.28, 1.5
TAU_POS, TAU_NEG = 1.0, 1.05
LOWER, UPPER, CAP = 0.8, 1.25, 1.2
SEQUENCE_LOWER, SEQUENCE_UPPER, KL_UPPER = 0.95, 1.05, 0.01
M2 = 0.02
OVERLONG, PENALTY = 5, 0.7
DISCOUNT, LAMBDA, VALUE_CLIP = 0.97, 0.9, 0.3


@dataclass(frozen=True, slots=True)
class Rollouts:
    """Float64. Padded positions hold numbers, too: a function that reads them differs from ours."""

    theta_BL: Tensor
    prox_BL: Tensor
    behav_BL: Tensor
    reference_BL: Tensor
    advantages_BL: Tensor  # alike over a trajectory
    mask_BL: Tensor  # bool: the first tokens of each row
    rewards_B: Tensor
    groups_B: Tensor
    lags_BL: Tensor  # int64, at least 1
    values_BL: Tensor
    new_values_BL: Tensor

    @property
    def lengths_B(self) -> Tensor:
        return self.mask_BL.sum(1)


def draw(seed: int) -> Rollouts:
    dice = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn(B, L, generator=dice, dtype=torch.float64)

    behav = -3 * torch.rand(B, L, generator=dice, dtype=torch.float64) - 0.05
    prox = behav + noise(0.2)
    lengths = torch.randint(2, L + 1, (B,), generator=dice)
    return Rollouts(
        theta_BL=prox + noise(0.3),
        prox_BL=prox,
        behav_BL=behav,
        reference_BL=prox + noise(0.3),
        advantages_BL=torch.randn(B, 1, generator=dice, dtype=torch.float64).expand(B, L).contiguous(),
        mask_BL=torch.arange(L) < lengths.unsqueeze(1),
        rewards_B=torch.randint(0, 5, (B,), generator=dice).double() / 4 + 1e-3 * torch.arange(B),
        groups_B=torch.arange(B) // GROUP,
        lags_BL=torch.randint(1, 6, (B, L), generator=dice),
        values_BL=noise(0.5),
        new_values_BL=noise(0.5),
    )
