"""Linear layers whose frozen weights have 4 bits a number: NF4 of QLoRA (arXiv 2305.14314), in plain torch.

A weight is cut into blocks of 64 numbers. A block keeps its largest absolute value (float32) and for each number which
of 16 values in [-1, 1] times that is nearest: quantiles of a normal distribution, so that weights use all alike. Each
use makes the whole matrix again, in a forward and a backward pass, and no pass keeps it.
"""

from typing import Any

import torch
from torch import Tensor, nn

from areal_bus.config.capacity import NF4_BLOCK as BLOCK

OFFSET = 0.9677083  # quantile of the outermost value, as the paper's code has it


def values() -> Tensor:
    """(16,) float32, ascending: 8 from -1 below 0, 0, and 7 up to 1 (eq. 4: quantiles, scaled to [-1, 1])."""
    above, below = (torch.special.ndtri(torch.linspace(OFFSET, 0.5, n, dtype=torch.float64))[:-1] for n in (9, 8))
    table: Tensor = (torch.cat([-below, torch.zeros(1), above.flip(0)]) / above[0]).float()
    return table


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """(uint8 codes, two numbers a byte; float32 largest absolute values of the blocks)."""
    flat = weight.detach().float().flatten()
    blocks = nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    table = values().to(flat.device)
    borders = (table[1:] + table[:-1]) / 2
    codes = torch.bucketize(blocks / largest.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(1), borders)
    pairs = codes.to(torch.uint8).view(-1, 2)
    return pairs[:, 0] << 4 | pairs[:, 1], largest


def dequantized(packed: Tensor, largest: Tensor, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """The weight, each number rounded to the nearest of its block's values."""
    codes = torch.stack([packed >> 4, packed & 15], 1).view(-1, BLOCK)
    whole = values().to(packed.device)[codes.int()].mul_(largest.unsqueeze(1)).to(dtype)
    return whole.flatten()[: shape.numel()].view(shape)


class Nf4Linear(nn.Linear):
    """A frozen linear layer with a 4-bit weight. It computes in the type of its input."""

    packed: Tensor
    largest: Tensor

    def take(self) -> None:
        """Quantise the weight that it has had as `nn.Linear`, which is dropped."""
        weight = self._parameters.pop("weight")
        if weight is None:
            raise ValueError("a weight is quantised once")
        packed, largest = quantized(weight)
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("largest", largest, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        y: Tensor = _Product.apply(x.to(dtype), self)  # type: ignore[no-untyped-call]
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def whole(self, dtype: torch.dtype) -> Tensor:
        """(outputs, inputs) the weight that it computes with."""
        return dequantized(self.packed, self.largest, torch.Size((self.out_features, self.in_features)), dtype)

    def _apply(self, fn: Any, recurse: bool = True) -> "Nf4Linear":
        """Moves it; a change of type leaves codes and scales as they are."""
        largest = self.largest
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self.largest = largest.to(self.packed.device)
        return self


class _Product(torch.autograd.Function):
    """x W^T. The gradient by x needs W, which is made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: Nf4Linear) -> Tensor:
        ctx.layer = layer
        return x @ layer.whole(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] @ ctx.layer.whole(gradients[0].dtype), None
