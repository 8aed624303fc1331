"""The distribution that tokens are drawn from under sampling controls: penalties, bias, min_p, top-k and top-p.

Definitions and order are vLLM's (its V1 sampler): logit bias, minimum length, penalties, temperature, min_p, top-k,
top-p. Pure functions of logits and tokens; log-probs are not computed here. Shapes: n rows, V vocabulary.
"""

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from actors.engines.builtin.sequence import FilteredRow


def filtered(logits_nV: Tensor, rows: Sequence[FilteredRow]) -> Tensor:
    """(n, V) probabilities to draw from, float32. At temperature 0 all weight is on the likeliest token."""
    adjusted_nV = logits_nV.float().clone()
    for logits_V, row in zip(adjusted_nV, rows, strict=True):
        if row.controls.changes_logits:
            adjust(logits_V, row)
    heats = [row.temperature or 1.0 for row in rows]
    weight_nV = torch.softmax(adjusted_nV / _column(heats, adjusted_nV), dim=-1)
    weight_nV = _min_p(weight_nV, [row.controls.min_p for row in rows])
    weight_nV = _top_k(weight_nV, [row.controls.top_k for row in rows])
    weight_nV = _top_p(weight_nV, [row.top_p for row in rows])
    for at, row in enumerate(rows):
        if not row.temperature:
            weight_nV[at] = torch.zeros_like(weight_nV[at]).index_fill_(0, adjusted_nV[at].argmax(), 1.0)
    return weight_nV


def adjust(logits_V: Tensor, row: FilteredRow) -> None:
    """Bias, minimum length and penalties, in place."""
    controls, device = row.controls, logits_V.device
    for token, bias in controls.logit_bias:
        logits_V[token] += bias
    if len(row.sampled) < controls.min_new_tokens and row.stops:
        logits_V[torch.tensor(sorted(row.stops), device=device)] = -torch.inf
    if controls.repetition_penalty != 1:
        seen = torch.tensor(sorted({*row.prompt, *row.sampled}), dtype=torch.long, device=device)
        kept = logits_V[seen]
        rate = controls.repetition_penalty
        logits_V[seen] = torch.where(kept > 0, kept / rate, kept * rate)
    if controls.counts_completion and row.sampled:
        counts = Counter(row.sampled)
        cost = [controls.frequency_penalty * n + controls.presence_penalty for n in counts.values()]
        logits_V[torch.tensor(list(counts), device=device)] -= torch.tensor(cost, device=device)


def _min_p(weight_nV: Tensor, min_ps: Sequence[float]) -> Tensor:
    """Tokens of at least min_p of the likeliest one's probability."""
    if not any(min_ps):
        return weight_nV
    least_n1 = _column(min_ps, weight_nV) * weight_nV.amax(-1, keepdim=True)
    return weight_nV.masked_fill(weight_nV < least_n1, 0.0)


def _top_k(weight_nV: Tensor, top_ks: Sequence[int]) -> Tensor:
    """The k likeliest tokens, and all that are as likely as the last of them."""
    width = weight_nV.shape[-1]
    most = [min(k, width) if k else width for k in top_ks]
    largest = max((k for k in most if k < width), default=0)
    if not largest:
        return weight_nV
    top_nK = weight_nV.topk(largest, dim=-1).values
    last_n1 = top_nK.gather(-1, torch.tensor([[min(k, largest) - 1] for k in most], device=weight_nV.device))
    is_cut_n1 = torch.tensor([[k < width] for k in most], device=weight_nV.device)
    return weight_nV.masked_fill(is_cut_n1 & (weight_nV < last_n1), 0.0)


def _top_p(weight_nV: Tensor, top_ps: Sequence[float]) -> Tensor:
    """The nucleus of what is left, whose weights are shares of their sum."""
    share_nV = weight_nV / weight_nV.sum(-1, keepdim=True)
    cut = [at for at, top_p in enumerate(top_ps) if top_p < 1]
    if cut:
        share_nV[cut] = nucleus(share_nV[cut], torch.tensor([top_ps[at] for at in cut], device=weight_nV.device))
    return share_nV


def nucleus(weight_nV: Tensor, top_p_n: Tensor) -> Tensor:
    """Top-p: keep the smallest set of likeliest tokens whose weights reach top_p; set the others to 0."""
    sorted_nV, order_nV = weight_nV.sort(dim=-1, descending=True)
    before_nV = sorted_nV.cumsum(-1, dtype=torch.float64) - sorted_nV
    sorted_nV = sorted_nV.masked_fill(before_nV >= top_p_n[:, None], 0.0)
    return torch.zeros_like(weight_nV).scatter_(-1, order_nV, sorted_nV)


def _column(numbers: Sequence[float], like: Tensor) -> Tensor:
    """(n, 1)."""
    return torch.tensor(numbers, device=like.device, dtype=like.dtype)[:, None]
