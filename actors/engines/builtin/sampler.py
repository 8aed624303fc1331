"""Samples tokens by inverting their distribution at a uniform number of a counter-based generator.

A token depends on its logits, its seed and its position only, not on the other rows of the batch or the process. The
definitions and the order of the sampling controls are vLLM's (its V1 sampler): logit bias, minimum length, penalties,
temperature, min_p, top-k, top-p.
Shapes: n rows, V vocabulary, W tokens of a part of it, G parts.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from actors.engines.builtin.sequence import FilteredRow
from areal_cpu.build import applies
from areal_cpu.sampler import sampled

W = 64
FEW = 1024  # a vocabulary of at most this size is one part
NEVER = -1e30  # a logit whose token has no weight, also divided by a temperature
NONE: Mapping[int, FilteredRow] = {}


def sample(
    logits_nV: Tensor,
    *,
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
    filters: Mapping[int, FilteredRow] = NONE,
    absent: Collection[int] = (),
) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob under the whole distribution at the row's temperature (float32).

    Temperature 0 takes the likeliest token and gives its log-prob at temperature 1. `filters`: rows that are drawn from
    another distribution; the log-prob is the same, of the logits as they come. `absent`: tokens that are never drawn.
    """
    tokens, logps = _unfiltered(logits_nV, temperatures, top_ps, uniforms)
    if filters:
        rows = list(filters)
        drawn = _by_filters(logits_nV[rows], list(filters.values()), [uniforms[row] for row in rows])
        for row, token, logp in zip(rows, *drawn, strict=True):
            tokens[row], logps[row] = token, logp
    again = [row for row, token in enumerate(tokens) if token in absent]
    if again:
        own = {place: filters[row] for place, row in enumerate(again) if row in filters}
        heats, nuclei, at = ([of[row] for row in again] for of in (temperatures, top_ps, uniforms))
        for row, token, logp in zip(again, *_without(logits_nV[again], absent, heats, nuclei, at, own), strict=True):
            tokens[row], logps[row] = token, logp
    return tokens, logps


def _without(
    logits_nV: Tensor,
    absent: Collection[int],
    temperatures: Sequence[float],
    top_ps: Sequence[float],
    uniforms: Sequence[float],
    filters: Mapping[int, FilteredRow],
) -> tuple[list[int], list[float]]:
    """Draw rows again whose token is absent: from the others, by the digits of the uniform that the first draw left."""
    kept_nV = logits_nV.clone()
    kept_nV[:, torch.tensor(sorted(absent), device=kept_nV.device)] = max(torch.finfo(kept_nV.dtype).min, NEVER)
    rest = [uniform * 2.0**24 % 1.0 for uniform in uniforms]
    tokens, _ = sample(kept_nV, temperatures=temperatures, top_ps=top_ps, uniforms=rest, filters=filters)
    logp_nV = torch.log_softmax(_tempered(logits_nV.float(), temperatures), dim=-1)
    return tokens, logp_nV.gather(-1, torch.tensor(tokens, device=logp_nV.device)[:, None])[:, 0].tolist()


def _by_filters(
    logits_nV: Tensor, rows: Sequence[FilteredRow], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    at_n = torch.tensor(uniforms, dtype=torch.float64, device=logits_nV.device)
    token_n = invert(filtered(logits_nV, rows), at_n)
    logp_nV = torch.log_softmax(_tempered(logits_nV.float(), [row.temperature for row in rows]), dim=-1)
    return token_n.tolist(), logp_nV.gather(-1, token_n[:, None])[:, 0].tolist()


def _unfiltered(
    logits_nV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    if not (applies(logits_nV.dtype, logits_nV.device) and logits_nV.is_contiguous()):
        return _by_torch(logits_nV, temperatures, top_ps, uniforms)
    tokens, logps = sampled(logits_nV, temperatures, uniforms)
    cut = [row for row, top_p in enumerate(top_ps) if top_p < 1 and temperatures[row] > 0]
    if cut:  # only these rows: a row does not depend on its neighbours
        heats, nuclei, at = ([of[row] for row in cut] for of in (temperatures, top_ps, uniforms))
        for row, token, logp in zip(cut, *_by_torch(logits_nV[cut], heats, nuclei, at), strict=True):
            tokens[row], logps[row] = token, logp
    return tokens, logps


def _by_torch(
    logits_nV: Tensor, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    device = logits_nV.device
    weight_nV = torch.softmax(_tempered(logits_nV.float(), temperatures), dim=-1)
    cut = [row for row, top_p in enumerate(top_ps) if top_p < 1 and temperatures[row] > 0]
    if cut:
        p_c = torch.tensor([top_ps[row] for row in cut], device=device)
        weight_nV[cut] = nucleus(weight_nV[cut], p_c)
    token_n = invert(weight_nV, torch.tensor(uniforms, dtype=torch.float64, device=device))
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    if greedy:
        token_n[greedy] = logits_nV[greedy].argmax(-1)
    chosen_n = weight_nV.gather(-1, token_n[:, None])[:, 0].log()  # top-p keeps the weight of the chosen token
    return token_n.tolist(), chosen_n.tolist()


def _tempered(logits_nV: Tensor, temperatures: Sequence[float]) -> Tensor:
    if all(t in (0, 1) for t in temperatures):
        return logits_nV
    heat_n = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=logits_nV.device)
    return logits_nV / heat_n[:, None]


def invert(weight_nV: Tensor, uniform_n: Tensor) -> Tensor:
    """Inverse transform sampling: the token whose share holds the uniform, never of weight 0; large rows by part."""
    if weight_nV.shape[-1] <= FEW:
        cdf_nV = weight_nV.cumsum(-1, dtype=torch.float64)
        return _passing(cdf_nV, uniform_n[:, None] * cdf_nV[:, -1:])[:, 0]
    n_short = -weight_nV.shape[-1] % W
    part_nGW = (F.pad(weight_nV, (0, n_short)) if n_short else weight_nV).view(len(weight_nV), -1, W)
    sum_nG = part_nGW.sum(-1).double()  # rounded as the weights are
    upto_nG = sum_nG.cumsum(-1)
    target_n1 = uniform_n[:, None] * upto_nG[:, -1:]
    which_n1 = _passing(upto_nG, target_n1)
    rest_n1 = target_n1 - upto_nG.gather(-1, which_n1) + sum_nG.gather(-1, which_n1)
    cdf_nW = part_nGW.gather(1, which_n1[:, :, None].expand(-1, -1, W))[:, 0].cumsum(-1, dtype=torch.float64)
    return (which_n1 * W + _passing(cdf_nW, rest_n1.clamp_(min=0)))[:, 0]


def _passing(cdf_nC: Tensor, target_n1: Tensor) -> Tensor:
    """First index of each row whose running sum exceeds the target (clamped just below the total)."""
    total_n1 = cdf_nC[:, -1:]
    inside_n1 = torch.minimum(target_n1, torch.nextafter(total_n1, torch.zeros_like(total_n1)))
    return torch.searchsorted(cdf_nC, inside_n1, right=True)


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
