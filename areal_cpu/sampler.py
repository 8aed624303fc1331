"""Samples one token per row of logits in C; float32 on a CPU.

Shapes: n rows, V vocabulary.
"""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from areal_cpu.build import addresses, function

PART = 64  # as in sampler.c


@cache
def _call() -> Callable[..., None]:
    return function("sampled", *[ctypes.c_int64] * 2, *[ctypes.c_void_p] * 7)


def sampled(
    logits_nV: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token a row and its log-prob at the row's temperature; the likeliest, and that of temperature 1, at 0.

    Raises ValueError where a row's logits are not numbers.
    """
    n, width = logits_nV.shape
    if not len(temperatures) == len(uniforms) == n:
        raise ValueError(f"{n} rows have {len(temperatures)} temperatures and {len(uniforms)} uniform numbers")
    rates = (ctypes.c_float * n)(*[1 / t if t > 0 else 0.0 for t in temperatures])
    numbers, tokens, logps = (ctypes.c_double * n)(*uniforms), (ctypes.c_int64 * n)(), (ctypes.c_float * n)()
    room = torch.empty(width + -(-width // PART))
    logits, weight = addresses(logits_nV, room)
    _call()(n, width, logits, rates, numbers, weight, weight + width * 4, tokens, logps)
    found = list(tokens)
    if -1 in found:
        raise ValueError(f"logits are numbers; those of row {found.index(-1)} are not")
    return found, list(logps)
