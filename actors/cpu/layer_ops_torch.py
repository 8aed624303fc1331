"""Operations between the matrix products of a fused layer, in torch: used without C kernels or with several threads.

`actors.cpu.layer_kernels` does the same in C. Shapes: S tokens of the row, E tokens of all sequences end to end
(see `PackedAttention`), C channels, H query heads, K key heads, D head width, A = (H + 2 K) D, X = H D, G gates,
N rows.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.models.packed_attention import PackedAttention

_attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer's attention."""

    n_query: int
    n_key: int
    width: int
    scale: float

    @property
    def n_rope(self) -> int:
        """Number of query and key heads, which come first."""
        return self.n_query + self.n_key


class LayerOps(Protocol):
    """Operations between matrix products. Tensors that are changed in place may be used once only."""

    rope_pairs: bool  # RoPE pairs adjacent channels; else one channel of each half of a head

    def norm(self, x_SC: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """x / rms(x) and rstd = 1 / rms(x): (S, C), (S, 1)."""
        ...

    def norm_back(self, grad_SC: Tensor, normed_SC: Tensor, rstd_S1: Tensor, to_SC: Tensor | None = None) -> Tensor:
        """Gradient of x, rstd (grad - normed mean(grad normed)), plus `to`; in place of `grad`."""
        ...

    def gate(self, both_SG2: Tensor) -> Tensor:
        """(S, G): silu of the first half of each row times the second."""
        ...

    def gate_back(self, both_SG2: Tensor, grad_SG: Tensor) -> None:
        """In place: `both` becomes its gradient and `grad` becomes the gated values."""
        ...

    def rope(
        self, qkv_SA: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, n_heads: int, width: int, back: bool = False
    ) -> None:
        """RoPE of the first heads of each row, in place; `back` undoes it."""
        ...

    def transposed(self, x_NE: Tensor) -> Tensor:
        """(E, N)."""
        ...

    def scale_back(self, grad_NE: Tensor, weight_NE: Tensor, scale_E: Tensor) -> Tensor:
        """(E): gradient of the scale. The gradient of weight * scale becomes that of the weight, in place."""
        ...


class TorchLayerOps:
    """`LayerOps` in torch. RoPE is one complex product."""

    rope_pairs = True

    def norm(self, x_SC: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        power_S1 = torch.linalg.vector_norm(x_SC, dim=-1, keepdim=True).square_().div_(x_SC.shape[-1])
        rstd_S1 = power_S1.add_(epsilon).rsqrt_()
        return x_SC * rstd_S1, rstd_S1

    def norm_back(self, grad_SC: Tensor, normed_SC: Tensor, rstd_S1: Tensor, to_SC: Tensor | None = None) -> Tensor:
        less_S1 = (grad_SC * normed_SC).mean(-1, keepdim=True).mul_(rstd_S1)
        grad_SC.mul_(rstd_S1).addcmul_(normed_SC, less_S1, value=-1.0)
        return grad_SC if to_SC is None else grad_SC.add_(to_SC)

    def gate(self, both_SG2: Tensor) -> Tensor:
        gate_SG, up_SG = both_SG2.chunk(2, dim=1)
        return F.silu(gate_SG).mul_(up_SG)

    def gate_back(self, both_SG2: Tensor, grad_SG: Tensor) -> None:
        gate_SG, up_SG = both_SG2.chunk(2, dim=1)
        open_SG = F.silu(gate_SG)
        gated_SG = open_SG * up_SG
        torch.ops.aten.silu_backward.grad_input(up_SG.mul_(grad_SG), gate_SG, grad_input=gate_SG)
        torch.mul(grad_SG, open_SG, out=up_SG)
        grad_SG.copy_(gated_SG)

    def rope(
        self, qkv_SA: Tensor, cos_SD: Tensor, sin_SD: Tensor, *, n_heads: int, width: int, back: bool = False
    ) -> None:
        half = width // 2
        angle_S1P = torch.complex(cos_SD[:, :half], sin_SD[:, :half]).unsqueeze(1)
        pairs_SNP = torch.view_as_complex(qkv_SA[:, : n_heads * width].view(len(qkv_SA), n_heads, half, 2))
        pairs_SNP.mul_(angle_S1P.conj() if back else angle_S1P)

    def transposed(self, x_NE: Tensor) -> Tensor:
        return x_NE.t()

    def scale_back(self, grad_NE: Tensor, weight_NE: Tensor, scale_E: Tensor) -> Tensor:
        by_scale_E = (grad_NE * weight_NE).sum(0)
        grad_NE.mul_(scale_E)
        return by_scale_E


def attention(qkv_SA: Tensor, packing: PackedAttention, heads: Heads) -> tuple[Tensor, list[Tensor]]:
    """(S, X): causal attention of each sequence to itself; and the tensors for `attention_back`.

    Sequences of one length go through one call.
    """
    qkv_EA = qkv_SA if packing.expand_E is None else qkv_SA.index_select(0, packing.expand_E)
    kept: list[Tensor] = []
    for (n, length), whole in _runs(packing, qkv_EA):
        q, k, v = _split(whole.view(n, length, -1, heads.width).transpose(1, 2), heads)
        kept += _attention(q, _spread(k, heads), _spread(v, heads), 0.0, True, scale=heads.scale)
    parts = [part.transpose(1, 2).reshape(-1, heads.n_query * heads.width) for part in kept[::2]]
    attn_EX = torch.cat(parts) if len(parts) > 1 else parts[0]
    return attn_EX if packing.keep_S is None else attn_EX.index_select(0, packing.keep_S), [qkv_EA, *kept]


def attention_back(grad_SX: Tensor, kept: tuple[Tensor, ...], packing: PackedAttention, heads: Heads) -> Tensor:
    """(S, A)."""
    qkv_EA, *of_runs = kept
    grad_EX = grad_SX
    if packing.keep_S is not None:
        grad_EX = grad_SX.new_zeros(len(qkv_EA), grad_SX.shape[1]).index_copy_(0, packing.keep_S, grad_SX)
    by_qkv_EA = torch.empty_like(qkv_EA)
    pairs = zip(of_runs[::2], of_runs[1::2], strict=True)
    for ((n, length), whole, grad, out), (attn, total) in zip(
        _runs(packing, qkv_EA, grad_EX, by_qkv_EA), pairs, strict=True
    ):
        shape = (n, length, -1, heads.width)
        q, k, v = _split(whole.view(shape).transpose(1, 2), heads)
        found = _attention_backward(
            grad.view(shape).transpose(1, 2), q, _spread(k, heads), _spread(v, heads), attn, total, 0.0, True,
            scale=heads.scale,
        )  # fmt: skip
        for part, by_part in zip(_split(out.view(shape).transpose(1, 2), heads), found, strict=True):
            part.copy_(by_part) if by_part.shape == part.shape else _gather(by_part, part)
    if packing.keep_S is None:
        return by_qkv_EA
    by_qkv_SA = by_qkv_EA.index_select(0, packing.keep_S)
    for place, row, n in packing.repeats:
        by_qkv_SA[row : row + n] += by_qkv_EA[place : place + n]
    return by_qkv_SA


def _runs(packing: PackedAttention, *wholes: Tensor) -> Any:
    """((number of sequences, length), slices of the tensors (E, ..)) for each run of equal lengths."""
    runs = [(len(list(run)), length) for length, run in groupby(packing.lengths)]
    sizes = [n * length for n, length in runs]
    return zip(runs, *(torch.split(whole, sizes) for whole in wholes), strict=True)


def _split(whole: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """(n, H + 2 K, length, D) -> queries, keys, values."""
    return torch.split(whole, [heads.n_query, heads.n_key, heads.n_key], dim=1)


def _spread(part: Tensor, heads: Heads) -> Tensor:
    """Repeat key heads, one per query head."""
    return part if heads.n_key == heads.n_query else part.repeat_interleave(heads.n_query // heads.n_key, dim=1)


def _gather(by_heads: Tensor, out: Tensor) -> None:
    """Sum the gradients of the query heads of each key head."""
    torch.sum(by_heads.view(len(out), out.shape[1], -1, *out.shape[2:]), dim=2, out=out)
