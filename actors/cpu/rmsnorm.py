"""The final RMSNorm of the Llama family, with an analytic backward pass.

It computes what transformers' norm does, in one or two passes over a row each way. Shapes: S tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from actors.cpu.layer_kernels import found
from actors.cpu.layer_ops_torch import LayerOps, TorchLayerOps

_PLAIN = TorchLayerOps()


class Norm(nn.Module):
    """A fused RMSNorm: replaces the class of a norm, keeps its parameter."""

    plain: Any  # its original class
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(.., C) -> (.., C)"""
        x_SC = hidden_states.reshape(-1, hidden_states.shape[-1])
        out_SC = _Normed.apply(x_SC, self.variance_epsilon, self.weight)  # type: ignore[no-untyped-call]
        return out_SC.view(hidden_states.shape)  # type: ignore[no-any-return]


class _Normed(torch.autograd.Function):
    """Over the root mean square, times the scale: (S, C) -> (S, C)."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, epsilon: float, scale_C: Tensor) -> Tensor:
        ops = ctx.ops = found(x_SC) or _PLAIN
        normed_SC, rstd_S1 = ops.norm(x_SC, epsilon)
        ctx.save_for_backward(normed_SC, rstd_S1, scale_C)
        return normed_SC * scale_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SC: Tensor) -> tuple[Tensor, None, Tensor]:
        """Works on a copy: other nodes may share the memory of the gradient."""
        normed_SC, rstd_S1, scale_C = ctx.saved_tensors
        ops: LayerOps = ctx.ops
        by_x_SC = grad_SC.clone(memory_format=torch.contiguous_format)
        by_scale_C = ops.scale_back(by_x_SC, normed_SC, scale_C)
        by_x_SC = ops.norm_back(by_x_SC, normed_SC, rstd_S1)
        return by_x_SC, None, by_scale_C
