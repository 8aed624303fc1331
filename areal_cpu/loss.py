"""Per-token policy loss, gradient and statistics in C.

All is contiguous float32 on a CPU. Shapes: N tokens.
"""

import ctypes
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from areal_cpu import build
from areal_cpu.build import addresses, alike, is_plain

_SIZE, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


@cache
def _call(name: str, n_pointers: int, n_numbers: int = 0) -> Callable[..., None]:
    return build.function(name, _SIZE, *[_FLOAT] * n_numbers, *[_POINTER] * n_pointers)


def log_ratio(prox_N: Tensor, behav_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """exp(d), d = prox - behav (N); the sum of exp(d) - 1 - d and the largest |d|, both ()."""
    alike(prox_N.shape, behav_N)
    weight_N, sums_2 = torch.empty_like(prox_N), prox_N.new_empty(2)
    _call("log_ratio", 4)(prox_N.numel(), *addresses(prox_N, behav_N, weight_N, sums_2))
    kl, largest = sums_2.unbind()
    return weight_N, kl, largest


def clipped(
    theta_N: Tensor, anchor_N: Tensor, advantage_N: Tensor, weight_N: Tensor | None, *, low: float, high: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """-sum(min(u A, clamp(u, low, high) A)) with u = exp(theta - anchor), A = advantage (times weight), and its grad.

    That sum (), how many tokens have the clamped branch as the smaller one (), u (N), and the sum's grad by theta (N).
    """
    given = [theta_N, anchor_N, advantage_N, *([] if weight_N is None else [weight_N])]
    alike(theta_N.shape, *given)
    ratio_N, grad_N, sums_2 = torch.empty_like(anchor_N), torch.empty_like(anchor_N), anchor_N.new_empty(2)
    pointers = [*addresses(*given), *[None] * (4 - len(given)), *addresses(ratio_N, grad_N, sums_2)]
    _call("clipped", 7, 2)(theta_N.numel(), low, high, *pointers)
    loss, n_clipped = sums_2.unbind()
    return loss, n_clipped, ratio_N, grad_N


def weight_sums(weight_N: Tensor) -> tuple[float, float]:
    """The sum of weights and that of their squares, in float64."""
    sums = (ctypes.c_double * 2)()
    _call("weight_sums", 2)(weight_N.numel(), *addresses(weight_N), sums)
    return sums[0], sums[1]


def applies(first: Tensor, *others: Tensor) -> bool:
    """Whether C does it: for one thread, such tensors, of one shape."""
    return (
        build.applies(first.dtype, first.device)
        and is_plain(first)
        and all(is_plain(tensor) and tensor.shape == first.shape for tensor in others)
    )
