"""What a decoder layer does to each row by itself, forward and backward, product by product; knows no layer.

`actors.kernels.dense` does the same for small weights in one pass. Products are oneDNN's or torch's; what is between
them is done by C kernels or by torch (see `between`). Shapes: S rows, C channels, A of queries, keys and values, X of
what attention saw, G gates, D width of a head, N rows of a weight's product, E and F its sides.
"""

from typing import Protocol

import torch
from torch import Tensor

from actors.kernels.dense import Angles
from actors.kernels.layer import found
from actors.models.product import added, multiplied
from actors.training.between import Between, Plain
from actors.training.linear import outer

_PLAIN = Plain()

Kept = tuple[Tensor, Tensor, Tensor]  # the norm (S, C), its rate (S, 1), gates and what they let through (S, 2 G)


class Way(Protocol):
    """Slopes are gradients on their way back. What is kept, and the slope by what was turned, may be used once only."""

    def projected(
        self, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, angles: Angles, epsilon: float, /
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(S, A) the norm of x by weight (A, C) and scale (C), its first heads turned; the norm (S, C), its rate."""
        ...

    def projected_back(
        self, slope: Tensor, normed: Tensor, rate: Tensor, weight: Tensor, scale: Tensor, angles: Angles, /, *,
        has_bias: bool,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        """The slopes by x, weight, scale and bias."""
        ...

    def fed(
        self, x: Tensor, seen: Tensor, epsilon: float, scale: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, /
    ) -> tuple[Tensor, Kept]:
        """(S, C): h = x + seen (S, X) by `out` (C, X), and h plus what the gates let through of its norm."""
        ...

    def fed_back(
        self, slope: Tensor, seen: Tensor, kept: Kept, scale: Tensor, out: Tensor, gate_up: Tensor, down: Tensor, /
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The slopes by x, seen, scale, `out`, gate_up (2 G, C) and down (C, G)."""
        ...


def projected(
    x_SC: Tensor, weight_AC: Tensor, scale_C: Tensor, bias_A: Tensor | None, angles: Angles, epsilon: float, /
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Way`. A head's channels may stand in another order: a score of queries and keys does not depend on it."""
    between = found(x_SC, angles.cos_ND, angles.sin_ND) or _PLAIN
    normed_SC, rate_S1 = between.norm(x_SC, epsilon)
    order_A = _order(between, angles, len(weight_AC))
    if order_A is not None:
        weight_AC, bias_A = weight_AC[order_A], None if bias_A is None else bias_A[order_A]
    qkv_SA = multiplied(normed_SC, weight_AC * scale_C, bias_A)
    between.turn(qkv_SA, angles.cos_ND, angles.sin_ND, n_heads=angles.n_heads, width=angles.width)
    return qkv_SA, normed_SC, rate_S1


def projected_back(
    slope_SA: Tensor, normed_SC: Tensor, rate_S1: Tensor, weight_AC: Tensor, scale_C: Tensor, angles: Angles, /, *,
    has_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    between = found(normed_SC, angles.cos_ND, angles.sin_ND) or _PLAIN
    between.turn(slope_SA, angles.cos_ND, angles.sin_ND, n_heads=angles.n_heads, width=angles.width, back=True)
    order_A = _order(between, angles, len(weight_AC))
    by_weight_AC = _back_in_order(outer(slope_SA, normed_SC), order_A)
    by_bias_A = _back_in_order(slope_SA.sum(0), order_A) if has_bias else None
    ordered_AC = weight_AC if order_A is None else weight_AC[order_A]
    by_x_SC = between.norm_back(multiplied(slope_SA, (ordered_AC * scale_C).t()), normed_SC, rate_S1)
    by_scale_C = between.scale_back(by_weight_AC, weight_AC, scale_C)
    return by_x_SC, by_weight_AC, by_scale_C, by_bias_A


def fed(
    x_SC: Tensor, seen_SX: Tensor, epsilon: float, scale_C: Tensor, out_CX: Tensor, gate_up_G2C: Tensor,
    down_CG: Tensor, /,
) -> tuple[Tensor, Kept]:  # fmt: skip
    h_SC = added(seen_SX, out_CX, x_SC)
    between = found(h_SC) or _PLAIN
    normed_SC, rate_S1 = between.norm(h_SC, epsilon)
    both_SG2 = multiplied(normed_SC, gate_up_G2C * scale_C)
    return added(between.gate(both_SG2), down_CG, h_SC), (normed_SC, rate_S1, both_SG2)


def fed_back(
    slope_SC: Tensor, seen_SX: Tensor, kept: Kept, scale_C: Tensor, out_CX: Tensor, gate_up_G2C: Tensor,
    down_CG: Tensor, /,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    normed_SC, rate_S1, both_SG2 = kept
    between = found(slope_SC) or _PLAIN
    fed_SG = multiplied(slope_SC, down_CG.t())  # at first its slope
    between.gate_back(both_SG2, fed_SG)
    by_down_CG = outer(slope_SC, fed_SG)
    by_gate_up_G2C = outer(both_SG2, normed_SC)
    by_normed_SC = multiplied(both_SG2, (gate_up_G2C * scale_C).t())
    by_scale_C = between.scale_back(by_gate_up_G2C, gate_up_G2C, scale_C)
    by_x_SC = between.norm_back(by_normed_SC, normed_SC, rate_S1, slope_SC)
    by_out_CX, by_seen_SX = outer(by_x_SC, seen_SX), multiplied(by_x_SC, out_CX.t())
    return by_x_SC, by_seen_SX, by_scale_C, by_out_CX, by_gate_up_G2C, by_down_CG


def _order(between: Between, angles: Angles, n_out: int) -> Tensor | None:
    """(A): rows of the weight, each turned pair side by side, where what turns wants it so."""
    if not between.turns_pairs:
        return None
    device, width = angles.cos_ND.device, angles.width
    order_D = torch.arange(width, device=device).view(2, -1).t().flatten()
    order_ND = torch.arange(angles.n_heads, device=device)[:, None] * width + order_D
    return torch.cat([order_ND.flatten(), torch.arange(angles.n_heads * width, n_out, device=device)])


def _back_in_order(whole: Tensor, order_A: Tensor | None) -> Tensor:
    return whole if order_A is None else torch.empty_like(whole).index_copy_(0, order_A, whole)
