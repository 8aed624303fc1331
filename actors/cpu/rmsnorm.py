"""The final RMSNorm of the Llama family, with an analytic backward pass.

It computes what transformers' norm does, in one or two passes over a row each way, in C. Shapes: S tokens, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from actors.cpu.layer_kernels import LayerKernels, found, made


class Norm(nn.Module):
    """A fused RMSNorm: replaces the class of a norm, keeps its parameter."""

    plain: Any  # its original class
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(.., C) -> (.., C). The original forward runs where no kernels apply."""
        x_SC = hidden_states.reshape(-1, hidden_states.shape[-1])
        if found(x_SC) is None:
            return self.plain.forward(self, hidden_states)  # type: ignore[no-any-return]
        out_SC = _Normed.apply(x_SC, self.variance_epsilon, self.weight)  # type: ignore[no-untyped-call]
        return out_SC.view(hidden_states.shape)  # type: ignore[no-any-return]


class _Normed(torch.autograd.Function):
    """Over the root mean square, times the scale: (S, C) -> (S, C)."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, epsilon: float, scale_C: Tensor) -> Tensor:
        normed_SC, rstd_S1 = made().norm(x_SC, epsilon)
        ctx.save_for_backward(normed_SC, rstd_S1, scale_C)
        return normed_SC * scale_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SC: Tensor) -> tuple[Tensor, None, Tensor]:
        """Works on a copy: other nodes may share the memory of the gradient."""
        normed_SC, rstd_S1, scale_C = ctx.saved_tensors
        ops: LayerKernels = made()
        by_x_SC = grad_SC.clone(memory_format=torch.contiguous_format)
        by_scale_C = ops.scale_back(by_x_SC, normed_SC, scale_C)
        by_x_SC = ops.norm_back(by_x_SC, normed_SC, rstd_S1)
        return by_x_SC, None, by_scale_C
