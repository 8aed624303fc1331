"""QKV projection and MLP of a decoder layer, forward and backward, one matrix product after another.

`areal_cpu.fused_mlp_qkv` does the same for small weights in one pass. Matrix products use oneDNN or torch; the
operations between them use C kernels. Shapes: S rows, C channels, A of queries, keys and
values, X of the attention output, G gates, D width of a head, N rows of a weight's product, E and F its sides.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from areal_cpu.fused_mlp_qkv import RopeAngles
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.linear import outer
from areal_cpu.matmul import added, multiplied

Kept = tuple[Tensor, Tensor, Tensor]  # the norm (S, C), its rstd (S, 1), gate and up (S, 2 G)


class LayerPath(Protocol):
    """QKV projection and MLP of a layer. Kept tensors, the gradient given to `qkv_backward` and merged weights are
    overwritten: each may be used once.
    """

    def qkv_forward(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, angles: RopeAngles, epsilon: float, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(S, A): RMSNorm, QKV projection by weight (A, C), RoPE; then the norm (S, C) and its rstd."""
        ...

    def qkv_backward(
        self, grad: Tensor, normed: Tensor, rstd: Tensor, weight: Tensor, scale: Tensor, angles: RopeAngles, /, *,
        has_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """Gradients of x, weight, scale and bias."""
        ...

    def mlp_forward(
        self, x: Tensor, attn: Tensor, epsilon: float, scale: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, /
    ) -> tuple[Tensor, Kept]:
        """(S, C): h = x + attn (S, X) @ out (C, X).T, then h + MLP(RMSNorm(h))."""
        ...

    def mlp_backward(
        self, grad: Tensor, attn: Tensor, kept: Kept, scale: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Gradients of x, attn, scale, out, gate_up (2 G, C) and down (C, G)."""
        ...


@dataclass(frozen=True, slots=True)
class UnfusedOps:
    """A `LayerPath` with one matrix product after another."""

    ops: LayerKernels

    def qkv_forward(
        self,
        x_SC: Tensor,
        weight_AC: Tensor,
        scale_C: Tensor,
        bias_A: Tensor | None,
        angles: RopeAngles,
        epsilon: float,
        /,
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed_SC, rstd_S1 = self.ops.norm(x_SC, epsilon)
        qkv_SA = multiplied(normed_SC, weight_AC.mul_(scale_C), bias_A)
        self.ops.rope(qkv_SA, angles.cos_ND, angles.sin_ND, n_heads=angles.n_heads, width=angles.width)
        return qkv_SA, normed_SC, rstd_S1

    def qkv_backward(
        self, grad_SA: Tensor, normed_SC: Tensor, rstd_S1: Tensor, weight_AC: Tensor, scale_C: Tensor,
        angles: RopeAngles, /, *, has_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        rope = self.ops.rope
        rope(grad_SA, angles.cos_ND, angles.sin_ND, n_heads=angles.n_heads, width=angles.width, back=True)
        by_weight_AC = outer(self.ops, grad_SA, normed_SC)
        by_bias_A = grad_SA.sum(0) if has_bias else None
        by_scale_C = self.ops.scale_back(by_weight_AC, weight_AC, scale_C)
        by_normed_SC = multiplied(grad_SA, weight_AC.mul_(scale_C).t())
        return self.ops.norm_back(by_normed_SC, normed_SC, rstd_S1), by_weight_AC, by_scale_C, by_bias_A

    def mlp_forward(
        self, x_SC: Tensor, attn_SX: Tensor, epsilon: float, scale_C: Tensor, out_CX: Tensor, gate_up_G2C: Tensor,
        down_CG: Tensor, /,
    ) -> tuple[Tensor, Kept]:  # fmt: skip
        h_SC = added(attn_SX, out_CX, x_SC)
        normed_SC, rstd_S1 = self.ops.norm(h_SC, epsilon)
        both_SG2 = multiplied(normed_SC, gate_up_G2C.mul_(scale_C))
        return added(self.ops.gate(both_SG2), down_CG, h_SC), (normed_SC, rstd_S1, both_SG2)

    def mlp_backward(
        self, grad_SC: Tensor, attn_SX: Tensor, kept: Kept, scale_C: Tensor, out_CX: Tensor, gate_up_G2C: Tensor,
        down_CG: Tensor, /,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        normed_SC, rstd_S1, both_SG2 = kept
        gated_SG = multiplied(grad_SC, down_CG.t())  # holds its gradient first
        self.ops.gate_back(both_SG2, gated_SG)
        by_down_CG = outer(self.ops, grad_SC, gated_SG)
        by_gate_up_G2C = outer(self.ops, both_SG2, normed_SC)
        by_scale_C = self.ops.scale_back(by_gate_up_G2C, gate_up_G2C, scale_C)
        by_normed_SC = multiplied(both_SG2, gate_up_G2C.mul_(scale_C).t())
        by_x_SC = self.ops.norm_back(by_normed_SC, normed_SC, rstd_S1, grad_SC)
        by_out_CX, by_attn_SX = outer(self.ops, by_x_SC, attn_SX), multiplied(by_x_SC, out_CX.t())
        return by_x_SC, by_attn_SX, by_scale_C, by_out_CX, by_gate_up_G2C, by_down_CG
