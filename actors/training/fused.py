"""Decoder layers of the Llama family, forward and backward written down: the plain layer in fewer passes over memory.

It computes what transformers' layer computes over a packed row, in another order of sums, for one learner in float32 on
a CPU. The scales of both norms are multiplied into the weights behind them, and the rows of query and key weights are
put into such an order that a rotation is one complex product. Knows no tokens and no loss.

Shapes: S tokens of the row, E of all sequences laid end to end (see `Packing`), C channels of the row, H query heads,
K key heads, D head width, A = (H + 2 K) D, G gates.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from actors.models.product import added, multiplied
from actors.training.attention import Packing
from actors.training.linear import outer

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
    def n_rotated(self) -> int:
        """Queries' and keys' heads, which come first."""
        return self.n_query + self.n_key


class Layer(GradientCheckpointingLayer):
    """What a decoder layer becomes: it keeps its modules and parameters."""

    plain: Any  # the class that it was of
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        position_embeddings: tuple[Tensor, Tensor],
        packing: Packing | None = None,
        **more: Any,
    ) -> Tensor:
        """(1, S, C) -> (1, S, C); what is no packed row goes the plain way."""
        if packing is None:
            out: Tensor = self.plain.forward(
                self, hidden_states, *others, position_embeddings=position_embeddings, **more
            )
            return out
        attention, mlp = self.self_attn, self.mlp
        h_SC = hidden_states[0]
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = Heads(
            attention.q_proj.out_features // attention.head_dim,
            attention.k_proj.out_features // attention.head_dim,
            attention.head_dim,
            attention.scaling,
        )
        qkv_SA = _Projected.apply(  # type: ignore[no-untyped-call]
            h_SC, _turns(*position_embeddings), heads, self.input_layernorm.variance_epsilon,
            self.input_layernorm.weight, *(part.weight for part in parts), *(part.bias for part in parts),
        )  # fmt: skip
        seen_SX = _Seen.apply(qkv_SA, packing, heads)  # type: ignore[no-untyped-call]
        out_SC = _Fed.apply(  # type: ignore[no-untyped-call]
            h_SC, seen_SX, self.post_attention_layernorm.variance_epsilon, self.post_attention_layernorm.weight,
            attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
        return out_SC.unsqueeze(0)  # type: ignore[no-any-return]


def _turns(cos_1SD: Tensor, sin_1SD: Tensor) -> Tensor:
    """(S, 1, D / 2), complex: the rotation of each token's pairs."""
    half = cos_1SD.shape[-1] // 2
    return torch.complex(cos_1SD[0, :, :half], sin_1SD[0, :, :half]).unsqueeze(1)


def _pairs(heads: Heads, device: torch.device) -> Tensor:
    """(A): rows of the joined weight, each rotated pair side by side; what was rotated are the halves of a head."""
    order_D = torch.arange(heads.width, device=device).view(2, -1).t().flatten()
    order_ND = torch.arange(heads.n_rotated, device=device)[:, None] * heads.width + order_D
    values = torch.arange(heads.n_rotated * heads.width, (heads.n_rotated + heads.n_key) * heads.width, device=device)
    return torch.cat([order_ND.flatten(), values])


def _complex(qkv_SA: Tensor, heads: Heads) -> Tensor:
    """(S, H + K, D / 2), complex: the pairs of queries and keys, in the same memory."""
    qk_SNP2 = qkv_SA[:, : heads.n_rotated * heads.width].view(len(qkv_SA), heads.n_rotated, -1, 2)
    return torch.view_as_complex(qk_SNP2)


def _normed(x_SC: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x over its root mean square, and the reciprocal of that: (S, C), (S, 1)."""
    power_S1 = torch.linalg.vector_norm(x_SC, dim=-1, keepdim=True).square_().div_(x_SC.shape[-1])
    rate_S1 = power_S1.add_(epsilon).rsqrt_()
    return x_SC * rate_S1, rate_S1


def _by_normed(by_normed_SC: Tensor, normed_SC: Tensor, rate_S1: Tensor, to_SC: Tensor | None = None) -> Tensor:
    """The gradient by what was normed, rate (g - n mean(g n)), added to what there is; without that, in place of g."""
    less_S1 = (by_normed_SC * normed_SC).mean(-1, keepdim=True).mul_(rate_S1)
    if to_SC is None:
        by_SC = by_normed_SC.mul_(rate_S1)
    else:
        by_SC = torch.addcmul(to_SC, by_normed_SC, rate_S1)
    return by_SC.addcmul_(normed_SC, less_S1, value=-1.0)


class _Projected(torch.autograd.Function):
    """Norm, product with the weights of queries, keys and values, rotation: (S, C) -> (S, A).

    Pairs of a head's channels stand side by side in it: a score of queries and keys does not depend on their order.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, turn_S1P: Tensor, heads: Heads, epsilon: float, scale_C: Tensor, *parts: Tensor | None
    ) -> Tensor:
        weights, biases = parts[:3], parts[3:]
        normed_SC, rate_S1 = _normed(x_SC, epsilon)
        order_A = _pairs(heads, x_SC.device)
        bias_A = None if biases[0] is None else torch.cat(biases)[order_A]  # type: ignore[arg-type]
        qkv_SA = multiplied(normed_SC, torch.cat(weights)[order_A].mul_(scale_C), bias_A)  # type: ignore[arg-type]
        _complex(qkv_SA, heads).mul_(turn_S1P)
        ctx.save_for_backward(normed_SC, rate_S1, turn_S1P, scale_C, order_A, *weights)
        ctx.heads, ctx.has_bias = heads, bias_A is not None
        return qkv_SA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SA: Tensor) -> tuple[Tensor | None, ...]:
        """The slope's memory is `_Seen`'s own and is turned in place: once only."""
        normed_SC, rate_S1, turn_S1P, scale_C, order_A, *weights = ctx.saved_tensors
        _complex(slope_SA, ctx.heads).mul_(turn_S1P.conj())
        weight_AC = torch.cat(weights)[order_A]
        by_scaled_AC = outer(slope_SA, normed_SC)
        by_scale_C = (by_scaled_AC * weight_AC).sum(0)
        by_weight_AC = torch.empty_like(weight_AC).index_copy_(0, order_A, by_scaled_AC * scale_C)
        sizes = [len(weight) for weight in weights]
        by_biases: tuple[Tensor | None, ...] = (None, None, None)
        if ctx.has_bias:
            by_bias_A = slope_SA.sum(0)
            by_biases = torch.split(torch.empty_like(by_bias_A).index_copy_(0, order_A, by_bias_A), sizes)
        by_normed_SC = multiplied(slope_SA, weight_AC.mul_(scale_C).t())
        by_x_SC = _by_normed(by_normed_SC, normed_SC, rate_S1)
        return by_x_SC, None, None, None, by_scale_C, *torch.split(by_weight_AC, sizes), *by_biases


class _Seen(torch.autograd.Function):
    """Causal attention of each sequence to itself: (S, A) -> (S, H D). Sequences of one length go through one call."""

    @staticmethod
    def forward(ctx: Any, qkv_SA: Tensor, packing: Packing, heads: Heads) -> Tensor:
        qkv_EA = qkv_SA if packing.expand_E is None else qkv_SA.index_select(0, packing.expand_E)
        kept: list[Tensor] = []
        for (n, length), whole in _runs(packing, qkv_EA):
            q, k, v = _split(whole.view(n, length, -1, heads.width).transpose(1, 2), heads)
            kept += _attention(q, _spread(k, heads), _spread(v, heads), 0.0, True, scale=heads.scale)
        seen = [part.transpose(1, 2).reshape(-1, heads.n_query * heads.width) for part in kept[::2]]
        seen_EX = torch.cat(seen) if len(seen) > 1 else seen[0]
        ctx.save_for_backward(qkv_EA, *kept)
        ctx.packing, ctx.heads = packing, heads
        return seen_EX if packing.keep_S is None else seen_EX.index_select(0, packing.keep_S)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SX: Tensor) -> tuple[Tensor, None, None]:
        packing, heads = ctx.packing, ctx.heads
        qkv_EA, *kept = ctx.saved_tensors
        slope_EX = slope_SX
        if packing.keep_S is not None:
            slope_EX = slope_SX.new_zeros(len(qkv_EA), slope_SX.shape[1]).index_copy_(0, packing.keep_S, slope_SX)
        by_qkv_EA = torch.empty_like(qkv_EA)
        pairs = zip(kept[::2], kept[1::2], strict=True)
        for ((n, length), whole, slope, out), (seen, total) in zip(
            _runs(packing, qkv_EA, slope_EX, by_qkv_EA), pairs, strict=True
        ):
            shape = (n, length, -1, heads.width)
            q, k, v = _split(whole.view(shape).transpose(1, 2), heads)
            found = _attention_backward(
                slope.view(shape).transpose(1, 2), q, _spread(k, heads), _spread(v, heads), seen, total, 0.0, True,
                scale=heads.scale,
            )  # fmt: skip
            for part, by_part in zip(_split(out.view(shape).transpose(1, 2), heads), found, strict=True):
                part.copy_(by_part) if by_part.shape == part.shape else _gather(by_part, part)
        if packing.keep_S is None:
            return by_qkv_EA, None, None
        by_qkv_SA = by_qkv_EA.index_select(0, packing.keep_S)
        for place, row, n in packing.repeats:
            by_qkv_SA[row : row + n] += by_qkv_EA[place : place + n]
        return by_qkv_SA, None, None


def _runs(packing: Packing, *wholes: Tensor) -> Any:
    """How many sequences, their length, and the part of each tensor (E, ..) that is theirs, by runs of one length."""
    runs = [(len(list(run)), length) for length, run in groupby(packing.lengths)]
    sizes = [n * length for n, length in runs]
    return zip(runs, *(torch.split(whole, sizes) for whole in wholes), strict=True)


def _split(whole: Tensor, heads: Heads) -> tuple[Tensor, ...]:
    """(n, H + 2 K, length, D) -> queries, keys, values."""
    return torch.split(whole, [heads.n_query, heads.n_key, heads.n_key], dim=1)


def _spread(part: Tensor, heads: Heads) -> Tensor:
    """A key head for each query head."""
    return part if heads.n_key == heads.n_query else part.repeat_interleave(heads.n_query // heads.n_key, dim=1)


def _gather(by_heads: Tensor, out: Tensor) -> None:
    """The gradients of a key head's query heads, added up."""
    torch.sum(by_heads.view(len(out), out.shape[1], -1, *out.shape[2:]), dim=2, out=out)


class _Fed(torch.autograd.Function):
    """What attention saw, projected and added to the row, and the feed-forward of that: (S, C), (S, H D) -> (S, C)."""

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, seen_SX: Tensor, epsilon: float, scale_C: Tensor, out_CX: Tensor, gate_GC: Tensor,
        up_GC: Tensor, down_CG: Tensor,
    ) -> Tensor:  # fmt: skip
        h_SC = added(seen_SX, out_CX, x_SC)
        normed_SC, rate_S1 = _normed(h_SC, epsilon)
        gate_SG, up_SG = multiplied(normed_SC, gate_GC * scale_C), multiplied(normed_SC, up_GC * scale_C)
        open_SG = F.silu(gate_SG)
        ctx.save_for_backward(
            seen_SX, normed_SC, rate_S1, gate_SG, up_SG, open_SG, scale_C, out_CX, gate_GC, up_GC, down_CG
        )
        return added(open_SG * up_SG, down_CG, h_SC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SC: Tensor) -> tuple[Tensor | None, ...]:
        """What is saved of gates is used up: once only."""
        (seen_SX, normed_SC, rate_S1, gate_SG, up_SG, open_SG, scale_C, out_CX, gate_GC, up_GC, down_CG) = (
            ctx.saved_tensors
        )
        by_fed_SG = multiplied(slope_SC, down_CG.t())
        by_down_CG = outer(slope_SC, open_SG * up_SG)
        by_gate_SG = torch.ops.aten.silu_backward(up_SG.mul_(by_fed_SG), gate_SG)
        by_up_SG = by_fed_SG.mul_(open_SG)
        by_scaled_gate_GC, by_scaled_up_GC = outer(by_gate_SG, normed_SC), outer(by_up_SG, normed_SC)
        by_scale_C = (by_scaled_gate_GC * gate_GC).sum(0) + (by_scaled_up_GC * up_GC).sum(0)
        by_normed_SC = added(by_up_SG, (up_GC * scale_C).t(), multiplied(by_gate_SG, (gate_GC * scale_C).t()))
        by_h_SC = _by_normed(by_normed_SC, normed_SC, rate_S1, slope_SC)
        by_out_CX, by_seen_SX = outer(by_h_SC, seen_SX), multiplied(by_h_SC, out_CX.t())
        by_gate_GC, by_up_GC = by_scaled_gate_GC * scale_C, by_scaled_up_GC * scale_C
        return by_h_SC, by_seen_SX, None, by_scale_C, by_out_CX, by_gate_GC, by_up_GC, by_down_CG
