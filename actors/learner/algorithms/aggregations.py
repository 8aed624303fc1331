"""Aggregations: the weight of each token in the loss of a minibatch. Denominators are global.

The loss is the sum over all trained tokens of weight * loss. `Totals` counts over all micro-batches and ranks, so how a
minibatch is cut changes nothing. Names as in verl's `loss_agg_mode`.
"""

import torch
from torch import Tensor

from actors.learner.algorithms.parts import Aggregation, Totals
from areal_bus.config.learner import ActorConfig


def token_mean(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / tokens of the minibatch: every token counts alike (DAPO, arXiv 2503.14476)."""
    return _alike(lengths_M, totals.n_tokens)


def seq_mean_token_mean(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / (trajectories * tokens of this one): every trajectory counts alike (GRPO, DeepSeekMath, eq. 3)."""
    return 1 / (totals.n_sequences * lengths_M.double())


def seq_mean_token_sum(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / trajectories (AReaL paper, eq. 2 and 5: a sum over tokens, an expectation over trajectories)."""
    return _alike(lengths_M, totals.n_sequences)


def seq_mean_token_sum_norm(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
    """1 / (trajectories * aggregation_length): a constant instead of each length (Dr. GRPO, arXiv 2503.20783)."""
    if settings.aggregation_length is None:
        raise ValueError("seq-mean-token-sum-norm needs actor.aggregation_length")
    return _alike(lengths_M, totals.n_sequences * settings.aggregation_length)


def _alike(lengths_M: Tensor, denominator: float) -> Tensor:
    return torch.full(lengths_M.shape, 1 / denominator, dtype=torch.float64, device=lengths_M.device)


AGGREGATIONS: dict[str, Aggregation] = {
    "token-mean": token_mean,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}
