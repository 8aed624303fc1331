"""The loss of a micro-batch: fused or plain, whole or in parts, and the terms beside the surrogate loss."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.algorithms.corrections import CORRECTIONS
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from actors.learner.algorithms.parts import Streams, Tokens, Totals, sequences_of
from actors.learner.algorithms.registry import find_algorithm
from actors.learner.update.objective import MicroBatchTokens, micro_batch_loss
from areal_bus.config.learner import ActorConfig
from tests.actors.learner.algorithms.test_losses import LENGTHS, gradient, tokens
from tests.support.learner_setup import random_shard, settings, tiny_actor, update

TOTALS = Totals(n_tokens=11.0, n_sequences=4.0)


def part_of(t: Tokens, sequences: range = range(4)) -> tuple[MicroBatchTokens, torch.Tensor, torch.Tensor | None]:
    """These sequences as a micro-batch, their log-probs and entropies."""
    lengths = torch.tensor([LENGTHS[i] for i in sequences])
    chosen = (t.sequences_N >= sequences[0]) & (t.sequences_N <= sequences[-1])
    part = MicroBatchTokens(
        behav_N=t.behav_N[chosen],
        advantages_N=t.advantages_N[chosen],
        lags_N=t.lags_N[chosen],
        sequences_N=sequences_of(lengths),
        lengths_M=lengths,
        streams=Streams({"prox": t.prox_N[chosen]}),
    )
    return part, t.logprobs_N[chosen], None if t.entropy_N is None else t.entropy_N[chosen]


@pytest.mark.parametrize("correction", ["decoupled", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_the_fused_way_agrees_with_the_plain_definition(correction: str, seed: int) -> None:
    t = tokens(seed, spread=0.6)
    keys: dict[str, Any] = {"correction": correction, "eps_clip_higher": 0.28, "behav_imp_weight_cap": 1.5}
    found = []
    for c_clip in (None, 1e9):  # a bound that is never reached takes the plain way
        algorithm = find_algorithm(ActorConfig(c_clip=c_clip, **keys))
        assert algorithm.is_fused == (c_clip is None)
        done = micro_batch_loss(algorithm, *part_of(t), TOTALS)
        found.append((done.loss.detach(), gradient(done.loss, t.logprobs_N), done.n_clipped, done.importance_N))
    torch.testing.assert_close(*found, atol=1e-12, rtol=1e-7)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_two_halves_of_a_micro_batch_add_up_to_the_whole(loss: str, correction: str, aggregation: str) -> None:
    if (loss in ("sapo", "oapl") and correction != "none") or (correction == "vcpo" and loss != "reinforce"):
        return  # refused
    t, keys = tokens(12), {"loss": loss, "correction": correction, "aggregation": aggregation}
    algorithm = find_algorithm(ActorConfig(**keys, aggregation_length=8))
    whole, *halves = (
        micro_batch_loss(algorithm, *part_of(t, sequences), TOTALS).loss
        for sequences in (range(4), range(2), range(2, 4))
    )
    total = halves[0] + halves[1]
    assert torch.allclose(gradient(total, t.logprobs_N), gradient(whole, t.logprobs_N), atol=1e-9)
    assert float(total.detach()) == pytest.approx(float(whole.detach()), abs=1e-9)


@pytest.mark.parametrize(
    ("keys", "figure", "sign", "least"),
    [
        ({"entropy_coef": 0.1, "lr": 1e-2}, "entropy", 1, 0.05),
        ({"kl_ctl": 1.0, "kl_estimator": "k2", "lr": 3e-3}, "kl_ref", -1, 0.1),
    ],
)
def test_a_bonus_moves_its_figure_where_the_rewards_have_no_signal(
    tmp_path: Path, keys: dict[str, Any], figure: str, sign: int, least: float
) -> None:
    """The entropy rises, the KL divergence from the reference falls; all tokens count."""
    actor, seen = tiny_actor(tmp_path, settings(actor=keys)), []
    for clock in range(4):
        fresh = [replace(i, clock=clock, step=clock, spans=[[clock, i.spans[0][1]]]) for i in random_shard(8)]
        stats = update(actor, [replace(item, reward=1.0) for item in fresh])
        assert stats["n_tokens_skipped"] == 0
        seen.append(sign * stats[figure])
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] + least
