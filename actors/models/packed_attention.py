"""Attention in torch over packed sequences, at the cost of each alone: runs of equal lengths go through one call."""

from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from actors.models.packed_row import PackedRow
from areal_cpu.sequences import Sequences

NAME = "areal_bus_packed"


class Part(Protocol):
    """Attention of a part of a packed row to all of it (actors/learner/model/context_parallel.py)."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float | None) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class PackedAttention:
    """Where the sequences of a packed row are (see `PackedRow`), on the model's device."""

    lengths: tuple[int, ...]
    expand_E: Tensor | None
    keep_S: Tensor | None
    repeats: tuple[tuple[int, int, int], ...] = ()  # (place among the E, row, length) of what is not at its first place
    sequences: Sequences | None = None  # for kernels, on a CPU

    @staticmethod
    def of(row: PackedRow, device: torch.device) -> "PackedAttention":
        sequences = Sequences.of(row.lengths, row.expand_E, row.keep_S) if device.type == "cpu" else None
        if row.expand_E is None or row.keep_S is None:
            return PackedAttention(row.lengths, None, None, sequences=sequences)
        repeats = _repeats(row.expand_E, row.keep_S)
        return PackedAttention(row.lengths, row.expand_E.to(device), row.keep_S.to(device), repeats, sequences)


def _repeats(expand_E: Tensor, keep_S: Tensor) -> tuple[tuple[int, int, int], ...]:
    """Runs of places whose row stands at an earlier or later place, too, and takes its gradient from there."""
    is_again_E = torch.ones(len(expand_E), dtype=torch.bool)
    is_again_E[keep_S] = False
    places = is_again_E.nonzero()[:, 0]
    rows = expand_E[places]
    is_new = torch.ones(len(places), dtype=torch.bool)
    is_new[1:] = (places.diff() != 1) | (rows.diff() != 1)
    starts = is_new.nonzero()[:, 0]
    lengths = torch.cat([starts, torch.tensor([len(places)])]).diff()
    return tuple(zip(places[starts].tolist(), rows[starts].tolist(), lengths.tolist(), strict=True))


class _Spread(torch.autograd.Function):
    """(1, heads, S, d) -> (1, heads, E, d): index_select of whole sequences, whose gradient adds run by run."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, packing: PackedAttention) -> Tensor:
        ctx.packing = packing
        return part.index_select(2, _given(packing.expand_E))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        packing: PackedAttention = ctx.packing
        sum_S = gradients[0].index_select(2, _given(packing.keep_S))
        for place, row, n in packing.repeats:
            sum_S[:, :, row : row + n] += gradients[0][:, :, place : place + n]
        return sum_S, None


class _Kept(torch.autograd.Function):
    """(E, ...) -> (S, ...): each row from its first place."""

    @staticmethod
    def forward(ctx: Any, whole: Tensor, packing: PackedAttention) -> Tensor:
        ctx.packing, ctx.shape = packing, whole.shape
        return whole.index_select(0, _given(packing.keep_S))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        zeros = gradients[0].new_zeros(ctx.shape)
        return zeros.index_copy_(0, _given(ctx.packing.keep_S), gradients[0]), None


def _given(index: Tensor | None) -> Tensor:
    if index is None:
        raise ValueError("only a row with shared prompts can be expanded")
    return index


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: "Packing",
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query (1, heads, S, d), key and value (1, key heads, S, d) -> (1, S, heads, d)."""
    if others.get("sliding_window") is not None or others.get("softcap") is not None or dropout:
        raise ValueError("packed attention is plain causal attention: no sliding window, soft cap or dropout")
    if not isinstance(packing, PackedAttention):
        return packing.attend(query, key, value, scaling=scaling), None
    if packing.expand_E is not None:  # whole sequences, shared prompts repeated
        query, key, value = (_Spread.apply(part, packing) for part in (query, key, value))  # type: ignore[no-untyped-call]
    outputs: list[Tensor] = []
    runs = [(length, len(list(run))) for length, run in groupby(packing.lengths)]
    sizes = [length * n for length, n in runs]
    # split, for its gradient is put together once: each slice would fill and add one of the whole size
    parts = zip(*(torch.split(part[0], sizes, dim=1) for part in (query, key, value)), strict=True)
    for (_, n), of_run in zip(runs, parts, strict=True):
        q, k, v = (_apart(part, n) for part in of_run)
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    whole = torch.cat(outputs)
    if packing.keep_S is not None:
        whole = _Kept.apply(whole, packing)  # type: ignore[no-untyped-call]
    return whole.unsqueeze(0), None


def keep_apart() -> None:
    """Leave this attention out of compiled layers: they would be compiled again for each row's lengths."""
    AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]


def _apart(part: Tensor, n: int) -> Tensor:
    """(heads, n * length, d) -> (n, heads, length, d), without a copy."""
    return part.view(part.shape[0], n, -1, part.shape[-1]).transpose(0, 1)


def supports(config: Any) -> bool:
    """Whether plain causal attention in every layer is all that a model's config asks for."""
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ["full_attention"])
    windowed = getattr(text, "sliding_window", None) is not None and getattr(text, "use_sliding_window", True)
    capped = getattr(text, "attn_logit_softcapping", None) is not None
    dropout = float(getattr(text, "attention_dropout", 0.0) or 0.0)
    return kinds == {"full_attention"} and not windowed and not capped and dropout == 0.0


Packing = PackedAttention | Part

AttentionInterface.register(NAME, packed_attention)


def choose(device: torch.device) -> None:
    """Turn off cuDNN's attention for the whole process: it makes a plan for each shape and never frees it."""
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)
