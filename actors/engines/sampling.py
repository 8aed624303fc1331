"""From logits and a uniform number for each token to tokens: the inverse of the distribution; knows no requests.

A token depends on its logits, its seed and its position, and on nothing else: not on who is in the batch, not on the
process. Shapes: n rows, V vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def sample(
    logits_nV: Tensor, *, temperatures: Sequence[float], top_ps: Sequence[float], uniforms: Sequence[float]
) -> tuple[list[int], list[float]]:
    """One token a row, and its log-prob under the whole distribution at the row's temperature (float32).

    Temperature 0 takes the likeliest token and gives its log-prob at temperature 1.
    """
    device = logits_nV.device
    heat_n = torch.tensor([t if t > 0 else 1.0 for t in temperatures], device=device)
    logp_nV = torch.log_softmax(logits_nV.float() / heat_n[:, None], dim=-1)
    weight_nV = logp_nV.exp()
    cut = [row for row, top_p in enumerate(top_ps) if top_p < 1]
    if cut:
        p_c = torch.tensor([top_ps[row] for row in cut], device=device)
        weight_nV[cut] = nucleus(weight_nV[cut], p_c)
    token_n = invert(weight_nV, torch.tensor(uniforms, dtype=torch.float64, device=device))
    greedy = [row for row, temperature in enumerate(temperatures) if temperature == 0]
    if greedy:
        token_n[greedy] = logp_nV[greedy].argmax(-1)
    chosen_n = logp_nV.gather(-1, token_n[:, None])[:, 0]
    return token_n.tolist(), chosen_n.tolist()


def nucleus(weight_nV: Tensor, top_p_n: Tensor) -> Tensor:
    """The weights with all but the smallest set of likeliest tokens that reaches top_p set to 0."""
    sorted_nV, order_nV = weight_nV.sort(dim=-1, descending=True)
    before_nV = sorted_nV.cumsum(-1, dtype=torch.float64) - sorted_nV
    sorted_nV = sorted_nV.masked_fill(before_nV >= top_p_n[:, None], 0.0)
    return torch.zeros_like(weight_nV).scatter_(-1, order_nV, sorted_nV)


def invert(weight_nV: Tensor, uniform_n: Tensor) -> Tensor:
    """Index of the token in whose share of the total weight the uniform falls; never one of weight 0."""
    cdf_nV = weight_nV.cumsum(-1, dtype=torch.float64)
    total_n = cdf_nV[:, -1]
    below_total_n = torch.nextafter(total_n, torch.zeros_like(total_n))
    target_n = torch.minimum(uniform_n * total_n, below_total_n)
    return torch.searchsorted(cdf_nV, target_n[:, None], right=True)[:, 0]
