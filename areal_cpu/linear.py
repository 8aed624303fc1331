"""Linear layers that use oneDNN, forward and backward, where it is faster than torch.

See `areal_cpu.matmul`: the same products, in another order of sums. Shapes: N rows, E in, F out.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_cpu.layer_kernels import LayerKernels, found
from areal_cpu.matmul import is_taken, multiplied, product


class Linear(nn.Linear):
    """nn.Linear with oneDNN products for float32 on CPU."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight
        if not (is_taken(weight) and x.dtype is torch.float32) or torch.is_autocast_enabled("cpu"):
            return F.linear(x, weight, self.bias)
        out_NF = _LinearFunction.apply(x.reshape(-1, x.shape[-1]), weight, self.bias)  # type: ignore[no-untyped-call]
        return out_NF.view(*x.shape[:-1], -1)  # type: ignore[no-any-return]


class _LinearFunction(torch.autograd.Function):
    """x weight^T + bias, and its gradients."""

    @staticmethod
    def forward(ctx: Any, x_NE: Tensor, weight_FE: Tensor, bias_F: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NE, weight_FE)
        return product(x_NE, weight_FE, bias_F)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x_NE, weight_FE = ctx.saved_tensors
        grad_NF = gradients[0]
        by_x, by_weight, by_bias = ctx.needs_input_grad
        return (
            product(grad_NF, weight_FE.t()) if by_x else None,
            outer(found(grad_NF, x_NE), grad_NF, x_NE) if by_weight else None,
            grad_NF.sum(0) if by_bias else None,
        )


def outer(kernels: LayerKernels | None, grad_NF: Tensor, x_NE: Tensor) -> Tensor:
    """(F, E): grad^T x. Transposes the narrower one: oneDNN is faster with the longer side first."""
    transposed = torch.t if kernels is None else kernels.transposed
    if grad_NF.shape[1] > x_NE.shape[1]:
        return transposed(multiplied(transposed(x_NE), grad_NF.t()))
    return multiplied(transposed(grad_NF), x_NE.t())


def replace(model: nn.Module) -> None:
    """Replace the class of all nn.Linear layers of a model; parameters stay."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = Linear
