"""Estimators of KL(pi, pi_ref) from sampled tokens (Schulman, "Approximating KL divergence", 2020). Pure: no I/O.

One number for each of N trained tokens, sampled from pi, with r = log pi_ref - log pi. Nothing is clamped. As a loss,
autograd differentiates the estimator at these tokens. On data from pi, the mean of that gradient is stated with each.
"""

from collections.abc import Callable

import torch
from torch import Tensor

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
