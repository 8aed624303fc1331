"""Changes a reward before the advantages; samples, figures and the journal keep the reward as it was. Pure."""

import torch
from torch import Tensor

from areal_bus.config.learner import ActorConfig


def shape_rewards(
    rewards_M: Tensor,
    lengths_M: Tensor,
    truncated_M: Tensor,
    settings: ActorConfig,
    *,
    max_new_tokens: Tensor | int,
    longest_M: Tensor | None = None,
) -> Tensor:
    """(M,) float64, in this order: zero if truncated, bias, scale, clip, overlong and length penalties.

    `lengths_M`: sampled tokens; `truncated_M`: bool, cut off by the length limit, which is `max_new_tokens`: one
    number, or (M,) where stages have different ones. `longest_M`: of the longest turn, for the overlong penalty, as the
    limit is that of one turn; None: each has one.
    """
    shaped = rewards_M.double()
    if settings.truncated_samples == "zero":
        shaped = torch.where(truncated_M, 0.0, shaped)
    shaped = (shaped + settings.reward_bias) * settings.reward_scaling
    if settings.reward_clip is not None:
        shaped = shaped.clamp(-settings.reward_clip, settings.reward_clip)
    lengths = lengths_M.double()
    if settings.overlong_tokens:
        of_turn = lengths if longest_M is None else longest_M.double()
        shaped = shaped + overlong_penalty(of_turn, settings, max_new_tokens=max_new_tokens)
    if settings.length_penalty:
        shaped = shaped - settings.length_penalty * lengths / max_new_tokens
    return shaped


def overlong_penalty(lengths_M: Tensor, settings: ActorConfig, *, max_new_tokens: Tensor | int) -> Tensor:
    """0 up to max_new_tokens - overlong_tokens, then down to -overlong_penalty_factor (DAPO, arXiv 2503.14476)."""
    over_M = lengths_M - (max_new_tokens - settings.overlong_tokens)
    return -settings.overlong_penalty_factor * (over_M / settings.overlong_tokens).clamp(0.0, 1.0)
