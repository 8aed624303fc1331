"""Causal attention over packed sequences without the square of their sum; knows nothing of tokens or models' layers.

transformers' own packed mask is dense: S x S for all sequences together. Here each sequence attends to itself only, so
the cost is that of the sequences alone. Runs of equal lengths go through one call.
"""

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from actors.training.row import Row

NAME = "areal_bus_packed"


@dataclass(frozen=True, slots=True)
class Packing:
    """Where the sequences of a packed row are (see `Row`), on the model's device."""

    lengths: tuple[int, ...]
    expand_E: Tensor | None
    keep_S: Tensor | None

    @staticmethod
    def of(row: Row, device: torch.device) -> "Packing":
        if row.expand_E is None or row.keep_S is None:
            return Packing(row.lengths, None, None)
        return Packing(row.lengths, row.expand_E.to(device), row.keep_S.to(device))


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packing: Packing,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """Query (1, heads, S, d), key and value (1, key heads, S, d) -> (1, S, heads, d)."""
    if others.get("sliding_window") is not None or others.get("softcap") is not None or dropout:
        raise ValueError("packed attention is plain causal attention: no sliding window, soft cap or dropout")
    if packing.expand_E is not None:  # whole sequences, shared prompts repeated
        query, key, value = (part.index_select(2, packing.expand_E) for part in (query, key, value))
    outputs: list[Tensor] = []
    start = 0
    for length, run in groupby(packing.lengths):
        n = len(list(run))
        stop = start + n * length
        q, k, v = (_apart(part[0, :, start:stop], n) for part in (query, key, value))
        out = scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
        start = stop
    whole = torch.cat(outputs)
    return (whole if packing.keep_S is None else whole.index_select(0, packing.keep_S)).unsqueeze(0), None


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


AttentionInterface.register(NAME, packed_attention)
