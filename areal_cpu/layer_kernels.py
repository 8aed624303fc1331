"""C kernels of a decoder layer: RMSNorm, RoPE, SwiGLU and attention, forward and backward.

Tensors are contiguous float32 on a CPU; one thread. Shapes: N rows,
E width, A channels of a row of queries, keys and values, H query heads, D width of a head.
"""

import ctypes
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from areal_cpu import build
from areal_cpu.build import addresses, alike, is_plain
from areal_cpu.sequences import Sequences

LEAST_LANES = 8
_SIZE, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _Packed(ctypes.Structure):
    _fields_ = [
        *((name, _SIZE) for name in ("n_sequences", "n_query", "n_key", "width")),
        ("scale", _FLOAT),
        *((name, _POINTER) for name in ("lengths", "firsts", "rows")),
    ]


class LayerKernels:
    """The operations between the matrix products of a layer. Raises RuntimeError if the library is missing.

    Some change a tensor in place, which may then be used once only.
    """

    def __init__(self) -> None:
        self._normed = build.function("normed", _SIZE, _SIZE, _FLOAT, *[_POINTER] * 3)
        self._norm = build.function("norm", _SIZE, _SIZE, _FLOAT, *[_POINTER] * 3)
        self._norm_back = build.function("norm_back", _SIZE, _SIZE, *[_POINTER] * 3)
        self._norm_back_onto = build.function("norm_back_onto", _SIZE, _SIZE, *[_POINTER] * 4)
        self._gate = build.function("gate", _SIZE, _SIZE, *[_POINTER] * 2)
        self._gate_back = build.function("gate_back", _SIZE, _SIZE, *[_POINTER] * 2)
        self._transpose = build.function("transpose", _SIZE, _SIZE, *[_POINTER] * 2)
        self._scale_back = build.function("scale_back", _SIZE, _SIZE, *[_POINTER] * 4)
        self._rope = build.function("rope", *[_SIZE] * 4, _FLOAT, *[_POINTER] * 3)
        self._target_logprobs = build.function("target_logprobs", _SIZE, _SIZE, *[_POINTER] * 5)
        lanes = _SIZE()
        build.function("packed_lanes", ctypes.POINTER(_SIZE))(ctypes.byref(lanes))
        self.attends = lanes.value >= LEAST_LANES  # otherwise the attention of torch is faster
        packed = ctypes.POINTER(_Packed)
        self._attention = build.function("packed_attention", packed, *[_POINTER] * 4)
        self._attention_back = build.function("packed_attention_back", packed, *[_POINTER] * 6)

    def normed(self, x_NE: Tensor, scale_E: Tensor, epsilon: float) -> Tensor:
        """(N, E): RMSNorm, for a forward pass alone."""
        n, width = x_NE.shape
        alike((width,), scale_E)
        out_NE = torch.empty_like(x_NE)
        self._normed(n, width, epsilon, *addresses(x_NE, scale_E, out_NE))
        return out_NE

    def norm(self, x_NE: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """x / rms(x) and rstd = 1 / rms(x): (N, E), (N, 1)."""
        n, width = x_NE.shape
        normed_NE, rstd_N1 = torch.empty_like(x_NE), x_NE.new_empty(n, 1)
        self._norm(n, width, epsilon, *addresses(x_NE, normed_NE, rstd_N1))
        return normed_NE, rstd_N1

    def norm_back(self, grad_NE: Tensor, normed_NE: Tensor, rstd_N1: Tensor, to_NE: Tensor | None = None) -> Tensor:
        """Gradient of x from the gradient of the norm, in place; adds `to_NE`."""
        n, width = grad_NE.shape
        alike((n, width), normed_NE, *([] if to_NE is None else [to_NE]))
        alike((n, 1), rstd_N1)
        if to_NE is None:
            self._norm_back(n, width, *addresses(normed_NE, rstd_N1, grad_NE))
        else:
            self._norm_back_onto(n, width, *addresses(normed_NE, rstd_N1, to_NE, grad_NE))
        return grad_NE

    def gate(self, both_NE: Tensor) -> Tensor:
        """(N, E / 2): silu of the first half of each row times the second."""
        n, width = both_NE.shape[0], both_NE.shape[1] // 2
        alike((n, 2 * width), both_NE)
        gated_NG = both_NE.new_empty(n, width)
        self._gate(n, width, *addresses(both_NE, gated_NG))
        return gated_NG

    def gate_back(self, both_NE: Tensor, grad_NG: Tensor) -> None:
        """In place: `both` becomes its gradient and `grad` becomes the gated values."""
        n, width = grad_NG.shape
        alike((n, 2 * width), both_NE)
        self._gate_back(n, width, *addresses(both_NE, grad_NG))
        increment_version((both_NE, grad_NG))  # saved tensors were overwritten: autograd must detect a second use

    def transposed(self, x_NE: Tensor) -> Tensor:
        """(E, N), contiguous."""
        n, width = x_NE.shape
        out_EN = x_NE.new_empty(width, n)
        self._transpose(n, width, *addresses(x_NE, out_EN))
        return out_EN

    def scale_back(self, grad_NE: Tensor, weight_NE: Tensor, scale_E: Tensor) -> Tensor:
        """(E): gradient of the scale. The gradient of weight * scale becomes that of the weight, in place."""
        n, width = grad_NE.shape
        alike((n, width), weight_NE)
        alike((width,), scale_E)
        by_scale_E = torch.empty_like(scale_E)
        self._scale_back(n, width, *addresses(weight_NE, scale_E, grad_NE, by_scale_E))
        return by_scale_E

    def rope(
        self, qkv_NA: Tensor, cos_ND: Tensor, sin_ND: Tensor, *, n_heads: int, width: int, back: bool = False
    ) -> None:
        """RoPE of the first heads of each row, in place, half against half; `back` undoes it."""
        n, stride = qkv_NA.shape
        alike((n, width), cos_ND, sin_ND)
        if width % 2 or n_heads * width > stride:
            raise ValueError(f"heads of even width turn, within a row: {n_heads} of {width} in {stride}")
        self._rope(n, stride, n_heads, width, -1.0 if back else 1.0, *addresses(cos_ND, sin_ND, qkv_NA))

    def target_logprobs(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probs of the targets (N), entropies (N), all probabilities (N, V). Raises IndexError for a bad target."""
        n, words = logits_NV.shape
        alike((n,), targets_N)
        if targets_N.dtype is not torch.int64 or not targets_N.is_contiguous():
            raise ValueError(f"a kernel takes contiguous int64 for targets: not {targets_N.dtype}")
        if n and not 0 <= int(targets_N.min()) <= int(targets_N.max()) < words:
            raise IndexError(f"targets must be ids below {words}")
        logp_N, entropy_N, share_NV = logits_NV.new_empty(n), logits_NV.new_empty(n), torch.empty_like(logits_NV)
        self._target_logprobs(
            n, words, *addresses(logits_NV), targets_N.data_ptr(), *addresses(logp_N, entropy_N, share_NV)
        )
        return logp_N, entropy_N, share_NV

    def attention(
        self, qkv_NA: Tensor, where: Sequences, *, n_query: int, n_key: int, scale: float
    ) -> tuple[Tensor, Tensor]:
        """(N, H D) causal attention output and (N, H) log-sum-exp of the scores."""
        width = qkv_NA.shape[1] // (n_query + 2 * n_key)
        alike((where.n_rows, (n_query + 2 * n_key) * width), qkv_NA)
        room = qkv_NA.new_empty(_room(where, width, back=False))
        packed = _packed(where, n_query, n_key, width, scale)
        out_NX, total_NH = qkv_NA.new_empty(len(qkv_NA), n_query * width), qkv_NA.new_empty(len(qkv_NA), n_query)
        self._attention(ctypes.byref(packed), *addresses(qkv_NA, room, out_NX, total_NH))
        return out_NX, total_NH

    def attention_back(
        self, grad_NX: Tensor, qkv_NA: Tensor, out_NX: Tensor, total_NH: Tensor, where: Sequences, *, n_key: int,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """(N, A): gradient of queries, keys and values from the gradient of the attention output."""
        n_query = total_NH.shape[1]
        width = out_NX.shape[1] // n_query
        alike((where.n_rows, (n_query + 2 * n_key) * width), qkv_NA)
        alike((where.n_rows, n_query * width), grad_NX, out_NX)
        alike((where.n_rows, n_query), total_NH)
        by_qkv_NA, room = torch.empty_like(qkv_NA), qkv_NA.new_empty(_room(where, width, back=True))
        packed = _packed(where, n_query, n_key, width, scale)
        self._attention_back(ctypes.byref(packed), *addresses(qkv_NA, out_NX, total_NH, grad_NX, room, by_qkv_NA))
        return by_qkv_NA


def _packed(where: Sequences, n_query: int, n_key: int, width: int, scale: float) -> _Packed:
    if n_key < 1 or n_query % n_key:
        raise ValueError(f"the number of query heads must be a multiple of that of key heads: {n_query} and {n_key}")
    pointers = (part.data_ptr() for part in (where.lengths, where.firsts, where.rows))
    return _Packed(len(where.lengths), n_query, n_key, width, scale, *pointers)


def _room(where: Sequences, width: int, *, back: bool) -> int:
    """Size of the scratch buffer of one head of a sequence, in floats (see varlen_attention.c)."""
    wide, filled = _up_to(width), _up_to(max(where.lengths.tolist(), default=0))
    if back:
        return 5 * filled * wide + 72 * wide + 64 * filled
    return 2 * filled * wide + 16 * wide + 8 * filled


def _up_to(n: int) -> int:
    return (n + 15) // 16 * 16


@cache
def made() -> LayerKernels:
    """The kernels of this process. Raises RuntimeError if the library is missing."""
    return LayerKernels()


def found(*tensors: Tensor) -> LayerKernels | None:
    """The kernels if they apply to these tensors (one thread, plain tensors), else None."""
    if build.library() is None or torch.get_num_threads() != 1 or not all(map(is_plain, tensors)):
        return None
    return made()
