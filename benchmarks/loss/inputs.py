"""Seeded log-probs and advantages, the same for every side. Imports torch only."""

import torch
from torch import Tensor

OFF_POLICY, MOVED = 0.05, 0.1  # standard deviations: of prox from behav, of theta from prox


def draw(n: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """theta, prox, behav and advantages of n tokens, float32."""
    dice = torch.Generator().manual_seed(seed)
    behav = -3 * torch.rand(n, generator=dice)
    prox = behav + OFF_POLICY * torch.randn(n, generator=dice)
    theta = prox + MOVED * torch.randn(n, generator=dice)
    return theta, prox, behav, torch.randn(n, generator=dice)
