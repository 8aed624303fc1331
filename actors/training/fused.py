"""Decoder layers of the Llama family, forward and backward written down: the plain layer in fewer passes over memory.

It computes what transformers' layer computes over a packed row, in another order of sums, for one learner in float32 on
a CPU. The scales of both norms are multiplied into the weights behind them. What is between the products is done by C
kernels or by torch (see `between`). Knows no tokens and no loss.

Shapes: S tokens of the row, C channels of it, H query heads, K key heads, D head width, A = (H + 2 K) D, X = H D,
G gates.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.modeling_layers import GradientCheckpointingLayer

from actors.kernels.layer import found
from actors.models.product import added, multiplied
from actors.training.attention import Packing
from actors.training.between import Between, Heads, Plain, seen, seen_back

_PLAIN = Plain()


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
        h_SC = hidden_states.flatten(0, 1)  # as a view, whose gradient is one: that of [0] would be filled and copied
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = Heads(
            attention.q_proj.out_features // attention.head_dim,
            attention.k_proj.out_features // attention.head_dim,
            attention.head_dim,
            attention.scaling,
        )
        qkv_SA = _Projected.apply(  # type: ignore[no-untyped-call]
            h_SC, *(part[0] for part in position_embeddings), heads, self.input_layernorm.variance_epsilon,
            self.input_layernorm.weight, *(part.weight for part in parts), *(part.bias for part in parts),
        )  # fmt: skip
        seen_SX = _Seen.apply(qkv_SA, packing, heads)  # type: ignore[no-untyped-call]
        out_SC = _Fed.apply(  # type: ignore[no-untyped-call]
            h_SC, seen_SX, self.post_attention_layernorm.variance_epsilon, self.post_attention_layernorm.weight,
            attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
        return out_SC.unsqueeze(0)  # type: ignore[no-any-return]


def _outer(between: Between, slope_NF: Tensor, x_NE: Tensor) -> Tensor:
    """(F, E): slope^T x. The narrower is transposed, and oneDNN is faster with the longer side first."""
    if slope_NF.shape[1] > x_NE.shape[1]:
        return between.transposed(multiplied(between.transposed(x_NE), slope_NF.t()))
    return multiplied(between.transposed(slope_NF), x_NE.t())


def _pairs(heads: Heads, device: torch.device) -> Tensor:
    """(A): rows of the joined weight, each turned pair side by side; what was turned are the halves of a head."""
    order_D = torch.arange(heads.width, device=device).view(2, -1).t().flatten()
    order_ND = torch.arange(heads.n_turned, device=device)[:, None] * heads.width + order_D
    values = torch.arange(heads.n_turned * heads.width, (heads.n_turned + heads.n_key) * heads.width, device=device)
    return torch.cat([order_ND.flatten(), values])


def _ordered(parts: tuple[Tensor, ...], order_A: Tensor | None) -> Tensor:
    whole = torch.cat(parts)
    return whole if order_A is None else whole[order_A]


def _parted(whole: Tensor, order_A: Tensor | None, sizes: list[int]) -> tuple[Tensor, ...]:
    if order_A is not None:
        whole = torch.empty_like(whole).index_copy_(0, order_A, whole)
    return torch.split(whole, sizes)


class _Projected(torch.autograd.Function):
    """Norm, product with the weights of queries, keys and values, rotation: (S, C) -> (S, A).

    A head's channels may stand in another order: a score of queries and keys does not depend on it.
    """

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, cos_SD: Tensor, sin_SD: Tensor, heads: Heads, epsilon: float, scale_C: Tensor,
        *parts: Any,
    ) -> Tensor:  # fmt: skip
        between = found(x_SC, cos_SD, sin_SD) or _PLAIN
        weights, biases = parts[:3], parts[3:]
        normed_SC, rate_S1 = between.norm(x_SC, epsilon)
        order_A = _pairs(heads, x_SC.device) if between.turns_pairs else None
        bias_A = None if biases[0] is None else _ordered(biases, order_A)
        qkv_SA = multiplied(normed_SC, _ordered(weights, order_A).mul_(scale_C), bias_A)
        between.turn(qkv_SA, cos_SD, sin_SD, n_heads=heads.n_turned, width=heads.width)
        ctx.save_for_backward(normed_SC, rate_S1, cos_SD, sin_SD, scale_C, order_A, *weights)
        ctx.between, ctx.heads, ctx.has_bias = between, heads, bias_A is not None
        return qkv_SA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SA: Tensor) -> tuple[Tensor | None, ...]:
        """The slope's memory is `_Seen`'s own and is turned in place: once only."""
        normed_SC, rate_S1, cos_SD, sin_SD, scale_C, order_A, *weights = ctx.saved_tensors
        between: Between = ctx.between
        between.turn(slope_SA, cos_SD, sin_SD, n_heads=ctx.heads.n_turned, width=ctx.heads.width, back=True)
        sizes = [len(weight) for weight in weights]
        by_biases = _parted(slope_SA.sum(0), order_A, sizes) if ctx.has_bias else (None, None, None)
        weight_AC = _ordered(tuple(weights), order_A)
        by_weight_AC = _outer(between, slope_SA, normed_SC)
        by_scale_C = between.scale_back(by_weight_AC, weight_AC, scale_C)
        by_normed_SC = multiplied(slope_SA, weight_AC.mul_(scale_C).t())
        by_x_SC = between.norm_back(by_normed_SC, normed_SC, rate_S1)
        by_weights = _parted(by_weight_AC, order_A, sizes)
        return by_x_SC, None, None, None, None, by_scale_C, *by_weights, *by_biases


class _Seen(torch.autograd.Function):
    """Causal attention of each sequence to itself: (S, A) -> (S, X)."""

    @staticmethod
    def forward(ctx: Any, qkv_SA: Tensor, packing: Packing, heads: Heads) -> Tensor:
        kernels = None if packing.sequences is None else found(qkv_SA)
        ctx.packing, ctx.heads = packing, heads
        if kernels is None or packing.sequences is None or not kernels.attends:
            ctx.kernels = None
            seen_SX, kept = seen(qkv_SA, packing, heads)
            ctx.save_for_backward(*kept)
            return seen_SX
        seen_SX, total_SH = kernels.attention(
            qkv_SA, packing.sequences, n_query=heads.n_query, n_key=heads.n_key, scale=heads.scale
        )
        ctx.kernels = kernels
        ctx.save_for_backward(qkv_SA, seen_SX, total_SH)
        return seen_SX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SX: Tensor) -> tuple[Tensor, None, None]:
        packing, heads, kernels = ctx.packing, ctx.heads, ctx.kernels
        if kernels is None:
            return seen_back(slope_SX, ctx.saved_tensors, packing, heads), None, None
        by_qkv_SA = kernels.attention_back(
            slope_SX.contiguous(), *ctx.saved_tensors, packing.sequences, n_key=heads.n_key, scale=heads.scale
        )
        return by_qkv_SA, None, None


class _Fed(torch.autograd.Function):
    """What attention saw, projected and added to the row, and the feed-forward of that: (S, C), (S, X) -> (S, C)."""

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, seen_SX: Tensor, epsilon: float, scale_C: Tensor, out_CX: Tensor, gate_GC: Tensor,
        up_GC: Tensor, down_CG: Tensor,
    ) -> Tensor:  # fmt: skip
        h_SC = added(seen_SX, out_CX, x_SC)
        between = ctx.between = found(h_SC) or _PLAIN
        normed_SC, rate_S1 = between.norm(h_SC, epsilon)
        both_SG2 = multiplied(normed_SC, torch.cat([gate_GC, up_GC]).mul_(scale_C))
        ctx.save_for_backward(seen_SX, normed_SC, rate_S1, both_SG2, scale_C, out_CX, gate_GC, up_GC, down_CG)
        return added(between.gate(both_SG2), down_CG, h_SC)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_SC: Tensor) -> tuple[Tensor | None, ...]:
        """What is saved of gates is used up: once only."""
        seen_SX, normed_SC, rate_S1, both_SG2, scale_C, out_CX, gate_GC, up_GC, down_CG = ctx.saved_tensors
        between: Between = ctx.between
        slope_SC = slope_SC.contiguous()
        fed_SG = multiplied(slope_SC, down_CG.t())  # at first its slope
        between.gate_back(both_SG2, fed_SG)
        by_down_CG = _outer(between, slope_SC, fed_SG)
        weight_G2C = torch.cat([gate_GC, up_GC])
        by_weight_G2C = _outer(between, both_SG2, normed_SC)
        by_scale_C = between.scale_back(by_weight_G2C, weight_G2C, scale_C)
        by_normed_SC = multiplied(both_SG2, weight_G2C.mul_(scale_C).t())
        by_h_SC = between.norm_back(by_normed_SC, normed_SC, rate_S1, slope_SC)
        by_out_CX, by_seen_SX = _outer(between, by_h_SC, seen_SX), multiplied(by_h_SC, out_CX.t())
        by_gate_GC, by_up_GC = by_weight_G2C.chunk(2)
        return by_h_SC, by_seen_SX, None, by_scale_C, by_out_CX, by_gate_GC, by_up_GC, by_down_CG
