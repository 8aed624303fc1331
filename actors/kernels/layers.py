"""What is between a layer's products, by C kernels; contiguous float32 on a CPU, knows no model.

Shapes: N rows, E width, F gates.
"""

import ctypes

import torch
from torch import Tensor

from actors.kernels.build import function

_SIZES, _POINTER = (ctypes.c_int64, ctypes.c_int64), ctypes.c_void_p


class Layers:
    """Raises RuntimeError where there is no library."""

    def __init__(self) -> None:
        self._normed = function("normed", *_SIZES, ctypes.c_float, _POINTER, _POINTER, _POINTER)
        self._gated = function("gated", *_SIZES, _POINTER, _POINTER)

    def normed(self, x_NE: Tensor, scale_E: Tensor, epsilon: float) -> Tensor:
        """(N, E): rows over their root mean square, times the scale."""
        out_NE = torch.empty_like(x_NE)
        self._normed(*x_NE.shape, epsilon, x_NE.data_ptr(), scale_E.data_ptr(), out_NE.data_ptr())
        return out_NE

    def gated(self, both_N2F: Tensor) -> Tensor:
        """(N, F): silu of the first half of each row times the second."""
        n, width = both_N2F.shape[0], both_N2F.shape[1] // 2
        out_NF = both_N2F.new_empty(n, width)
        self._gated(n, width, both_N2F.data_ptr(), out_NF.data_ptr())
        return out_NF
