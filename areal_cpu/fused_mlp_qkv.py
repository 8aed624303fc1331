"""Fused QKV projection and MLP of a decoder layer in C, forward and backward, for small weights.

A chunk of rows passes all operations before the next chunk, so that it stays in the cache. Tensors are contiguous
float32 on a CPU; one thread. Shapes: N rows, C channels, A of
queries, keys and values, X of the attention output, G gates, D width of a head.
"""

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from areal_cpu import layer_kernels
from areal_cpu.build import addresses, alike, function
from areal_cpu.packed_weights import panels, panels_back

CHUNK = 96  # as in gemm.h
MOST = 4 << 20  # bytes of the largest weight: a larger one leaves the cache between two chunks of rows

_SIZE, _FLOAT, _POINTER = ctypes.c_int64, ctypes.c_float, ctypes.c_void_p


class _QkvShape(ctypes.Structure):
    """Of fused_mlp_qkv.c, as those that follow."""

    _fields_ = (*((name, _SIZE) for name in ("n", "width", "n_out", "n_rope", "head_width")), ("epsilon", _FLOAT))


class _MlpShape(ctypes.Structure):
    _fields_ = (*((name, _SIZE) for name in ("n", "width", "n_attn", "n_gates")), ("epsilon", _FLOAT))


class _MlpWeights(ctypes.Structure):
    _fields_ = tuple((name, _POINTER) for name in ("out", "gate_up", "down", "by_out", "by_gate_up", "by_down"))


@cache
def _call(name: str, n_pointers: int, *shapes: type) -> Callable[..., None]:
    return function(name, *(ctypes.POINTER(shape) for shape in shapes), *[_POINTER] * n_pointers)


@dataclass(frozen=True, slots=True)
class RopeAngles:
    """RoPE angles of each row, for its first `n_heads` heads."""

    cos_ND: Tensor
    sin_ND: Tensor
    n_heads: int

    @property
    def width(self) -> int:
        return int(self.cos_ND.shape[1])

    def of(self, n: int, n_out: int) -> list[int]:
        """Addresses. Raises ValueError for what C could not follow."""
        width = self.width
        alike((n, width), self.cos_ND, self.sin_ND)
        if width % 2 or self.n_heads * width > n_out:
            raise ValueError(f"heads of even width turn, within a row: {self.n_heads} of {width} in {n_out}")
        return addresses(self.cos_ND, self.sin_ND)


def qkv_forward(
    x_NC: Tensor, weight_AC: Tensor, scale_C: Tensor, bias_A: Tensor | None, angles: RopeAngles, epsilon: float, /
) -> tuple[Tensor, Tensor, Tensor]:
    """(N, A): QKV projection of RMSNorm(x) with RoPE; and, for the backward pass, the norm (N, C) and its rstd (N,
    1).
    """
    (n, width), n_out = x_NC.shape, len(weight_AC)
    alike((n_out, width), weight_AC)
    if bias_A is not None:
        alike((n_out,), bias_A)
    out_NA, normed_NC, rstd_N1 = x_NC.new_empty(n, n_out), torch.empty_like(x_NC), x_NC.new_empty(n, 1)
    shape = _QkvShape(n, width, n_out, angles.n_heads, angles.width, epsilon)
    ready = panels(weight_AC, scale_C)
    _call("qkv_forward", 8, _QkvShape)(
        shape, *addresses(x_NC), *angles.of(n, n_out), *addresses(ready), _of(bias_A),
        *addresses(normed_NC, rstd_N1, out_NA),
    )  # fmt: skip
    return out_NA, normed_NC, rstd_N1


def qkv_backward(
    grad_NA: Tensor, normed_NC: Tensor, rstd_N1: Tensor, weight_AC: Tensor, scale_C: Tensor, angles: RopeAngles, /,
    *, has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of x (N, C), weight (A, C), scale (C) and bias (A). RoPE of `grad_NA` is undone in place."""
    (n, width), n_out = normed_NC.shape, len(weight_AC)
    alike((n, n_out), grad_NA)
    alike((n_out, width), weight_AC)
    alike((n, 1), rstd_N1)
    by_x_NC, by_weight_AC = torch.empty_like(normed_NC), torch.zeros_like(weight_AC)
    by_bias_A = grad_NA.new_zeros(n_out) if has_bias else None
    shape = _QkvShape(n, width, n_out, angles.n_heads, angles.width)
    ready = panels_back(weight_AC, scale_C)
    _call("qkv_backward", 9, _QkvShape)(
        shape, *addresses(grad_NA), *angles.of(n, n_out), *addresses(normed_NC, rstd_N1, ready, by_x_NC, by_weight_AC),
        _of(by_bias_A),
    )  # fmt: skip
    return by_x_NC, by_weight_AC, _scale_back(by_weight_AC, weight_AC, scale_C), by_bias_A


def mlp_forward(
    x_NC: Tensor,
    attn_NX: Tensor,
    epsilon: float,
    scale_C: Tensor,
    out_CX: Tensor,
    gate_up_G2C: Tensor,
    down_CG: Tensor,
    /,
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """(N, C): h = x + attn @ out.T, then h + MLP(RMSNorm(h)); and the tensors that the backward pass needs."""
    shape = _mlp_shape(x_NC, attn_NX, out_CX, gate_up_G2C, down_CG, epsilon)
    n, n_gates = shape.n, shape.n_gates
    out_NC, normed_NC, rstd_N1 = torch.empty_like(x_NC), torch.empty_like(x_NC), x_NC.new_empty(n, 1)
    both_NG2, room = x_NC.new_empty(n, 2 * n_gates), x_NC.new_empty(CHUNK * n_gates)
    ready = (panels(out_CX), panels(gate_up_G2C, scale_C), panels(down_CG))
    _call("mlp_forward", 10, _MlpShape)(
        shape, *addresses(x_NC, attn_NX, *ready, normed_NC, rstd_N1, both_NG2, room, out_NC)
    )  # fmt: skip
    return out_NC, (normed_NC, rstd_N1, both_NG2)


def mlp_backward(
    grad_NC: Tensor, attn_NX: Tensor, kept: tuple[Tensor, Tensor, Tensor], scale_C: Tensor, out_CX: Tensor,
    gate_up_G2C: Tensor, down_CG: Tensor, /,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of x, attn, scale, out, gate_up and down. Overwrites the kept gates."""
    normed_NC, rstd_N1, both_NG2 = kept
    shape = _mlp_shape(grad_NC, attn_NX, out_CX, gate_up_G2C, down_CG, 0.0)
    alike((shape.n, shape.width), normed_NC)
    alike((shape.n, 1), rstd_N1)
    alike((shape.n, 2 * shape.n_gates), both_NG2)
    by_x_NC, by_attn_NX, room = (
        torch.empty_like(grad_NC),
        torch.empty_like(attn_NX),
        grad_NC.new_empty(CHUNK * shape.n_gates),
    )
    by_weights = [torch.zeros_like(weight) for weight in (out_CX, gate_up_G2C, down_CG)]
    ready = (panels_back(out_CX), panels_back(gate_up_G2C, scale_C), panels_back(down_CG))
    weights = _MlpWeights(*addresses(*ready, *by_weights))
    _call("mlp_backward", 8, _MlpShape, _MlpWeights)(
        shape, weights, *addresses(grad_NC, attn_NX, normed_NC, rstd_N1, both_NG2, room, by_x_NC, by_attn_NX)
    )
    increment_version((both_NG2,))  # a saved tensor was overwritten: autograd must detect a second use
    by_out_CX, by_gate_up_G2C, by_down_CG = by_weights
    by_scale_C = _scale_back(by_gate_up_G2C, gate_up_G2C, scale_C)
    return by_x_NC, by_attn_NX, by_scale_C, by_out_CX, by_gate_up_G2C, by_down_CG


def _mlp_shape(
    x_NC: Tensor, attn_NX: Tensor, out_CX: Tensor, gate_up_G2C: Tensor, down_CG: Tensor, epsilon: float
) -> _MlpShape:
    """Check the shapes, which C cannot."""
    (n, width), n_attn, n_gates = x_NC.shape, attn_NX.shape[1], down_CG.shape[1]
    alike((n, n_attn), attn_NX)
    alike((width, n_attn), out_CX)
    alike((2 * n_gates, width), gate_up_G2C)
    alike((width, n_gates), down_CG)
    return _MlpShape(n, width, n_attn, n_gates, epsilon)


def _of(vector: Tensor | None) -> int | None:
    return None if vector is None else addresses(vector)[0]


def _scale_back(grad_NE: Tensor, weight_NE: Tensor, scale_E: Tensor) -> Tensor:
    return layer_kernels.made().scale_back(grad_NE, weight_NE, scale_E)


def applies(*tensors: Tensor, n_bytes: int) -> bool:
    """Whether the C kernels apply: long enough vectors, one thread, plain tensors, no weight over MOST."""
    kernels = layer_kernels.found(*tensors)
    return kernels is not None and kernels.attends and n_bytes <= MOST
