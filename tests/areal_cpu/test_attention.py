"""Attention in the forms that a GPU's kernels take, against every head written down."""

import pytest
import torch
from torch import Tensor

from areal_cpu.fused_llama import attention


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Each query head by its own key head."""
    group = q.shape[1] // k.shape[1]
    heads = []
    for h in range(q.shape[1]):
        scores = scale * q[:, h] @ k[:, h // group].transpose(1, 2) + mask[:, 0]
        heads.append(torch.softmax(scores, dim=-1) @ v[:, h // group])
    return torch.stack(heads, dim=1)


@pytest.mark.parametrize(("n_query", "n_key"), [(6, 2), (4, 1), (3, 3)])
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_mask_with_fewer_key_heads(n_query: int, n_key: int, tokens: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, heads, n, 8) for heads, n in ((n_query, tokens), (n_key, 7), (n_key, 7)))
    mask = torch.zeros(3, 1, tokens, 7).masked_fill_(torch.rand(3, 1, tokens, 7) < 0.4, torch.finfo().min)
    mask[..., 0] = 0.0
    torch.testing.assert_close(attention(q, k, v, mask, 0.3), plain(q, k, v, mask, 0.3))


@pytest.mark.parametrize("tokens", [1, 5])
def test_no_mask_is_causal(tokens: int) -> None:
    """One token sees all that is there."""
    torch.manual_seed(1)
    n_seen = 7 if tokens == 1 else tokens
    q, k, v = (torch.randn(2, heads, n, 8) for heads, n in ((4, tokens), (2, n_seen), (2, n_seen)))
    mask = torch.zeros(2, 1, tokens, n_seen)
    if tokens > 1:
        unseen = torch.arange(n_seen) > torch.arange(tokens)[:, None]
        mask.masked_fill_(unseen, torch.finfo().min)
    torch.testing.assert_close(attention(q, k, v, None, 0.3), plain(q, k, v, mask, 0.3))
