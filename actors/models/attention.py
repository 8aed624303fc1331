"""Attention in torch: chooses the kernel and the layout."""

import torch
import torch.nn.functional as F
from torch import Tensor


def choose(device: torch.device) -> None:
    """Turn off cuDNN's attention for the whole process: on a GPU it makes a plan for each shape and never frees it.

    The lengths of samples, and of what a step reads, are hardly twice the same.
    """
    if device.type == "cuda":
        torch.backends.cuda.enable_cudnn_sdp(False)


def attention(q_BHTD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(B, H, T, D); H may be a multiple of the heads of keys and values. Without a mask it is causal.

    On a GPU flash attention has no mask, and whether the memory-efficient kernel has fewer key heads than query heads
    depends on the release; where none serves torch writes all scores down in float32. So with a mask it is never asked
    for: one token's query heads of a key head are so many tokens, which see the same; for more tokens keys and values
    are repeated. (Without a mask that is left to torch, and so float32 on a GPU to that form.)
    """
    group, one = q_BHTD.shape[1] // k_BHLD.shape[1], q_BHTD.shape[2] == 1
    if mask is None or group == 1:
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BHLD,
            v_BHLD,
            attn_mask=mask,
            is_causal=mask is None and not one,
            scale=scale,
            enable_gqa=group > 1,
        )
    if one and mask.shape[1] == 1:
        q_BKGD = q_BHTD.reshape(len(q_BHTD), -1, group, q_BHTD.shape[3])
        seen_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)
        return seen_BKGD.reshape(q_BHTD.shape)
    k_BHLD, v_BHLD = (part.repeat_interleave(group, dim=1) for part in (k_BHLD, v_BHLD))
    return F.scaled_dot_product_attention(q_BHTD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)
