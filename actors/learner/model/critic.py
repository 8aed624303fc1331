"""The critic: a value model of its own with an optimizer of its own, for PPO with GAE. Never pushed to generators.

Shapes: K sampled tokens of a trajectory, N tokens of a micro-batch, T = K.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from actors.learner.algorithms.advantages import generalized_advantages
from actors.learner.algorithms.running import RETURNS, Total, deviation, empty, merged
from actors.learner.batching import Batch, Item
from actors.learner.model.chunked_head import SOFT_CAP
from actors.learner.model.policy import PROBE, ModelSettings, Policy, whole
from actors.models.packed_row import SequencePiece, lay_out
from areal_bus.config.learner import ActorConfig, CriticConfig
from areal_bus.messages import Finish
from areal_bus.sample_fields import TOKEN_REWARD

CLIP_EPSILON = 1e-6


class ValueModel(Policy):
    """A causal LM whose head has one output: the value of the state before each wanted token."""

    def __init__(self, model: Any, **settings: Unpack[ModelSettings]) -> None:
        """The settings of `Policy`. A head of another size is replaced by one of zeros: every value is 0 at first."""
        is_fresh = replace_head(model)
        super().__init__(model, **settings)
        if is_fresh:
            with torch.no_grad():
                self.model.get_output_embeddings().weight.zero_()

    def values(self, pieces: Sequence[SequencePiece]) -> Tensor:
        """(N,) float32 values, in the order of the wanted tokens."""
        if self.alone and len(pieces) > 1:
            return torch.cat([self.values([piece]) for piece in pieces])
        row = lay_out(pieces, share=self.packed)
        n = len(row.wanted_N)
        split = self.split(row)
        if split is None:
            return self._forward(row, self.packing(row)).flatten().float()
        return split.whole(self._forward(split.part, split).flatten().float())[:n]

    def _probe(self) -> Tensor:
        """A loss over two sequences with a common prefix."""
        ids_T = torch.arange(PROBE) * 7919 % self.model.get_input_embeddings().num_embeddings
        pieces = [SequencePiece(ids, torch.arange(1, len(ids)), family=0) for ids in (ids_T, ids_T[: PROBE - 3])]
        return self.values(pieces).square().sum()

    def idle_pass(self) -> None:
        piece = SequencePiece(ids_T=torch.zeros(2, dtype=torch.int64), places_K=torch.ones(1, dtype=torch.int64))
        values_N = self.values([piece])
        if torch.is_grad_enabled():
            (values_N.sum() * 0.0).backward()  # type: ignore[no-untyped-call]


def replace_head(model: Any) -> bool:
    """Give the model a head of one output, not tied to its embeddings; False if it has one."""
    if getattr(model.config.get_text_config(), SOFT_CAP, None) is not None:
        setattr(model.config.get_text_config(), SOFT_CAP, None)  # values have no bound
    head = model.get_output_embeddings()
    if head.weight.shape[0] == 1:
        return False
    fresh = nn.Linear(head.weight.shape[1], 1, bias=False, dtype=head.weight.dtype, device=head.weight.device)
    with torch.no_grad():  # not zeros while fused layers are compared with the model's own
        fresh.weight.copy_(torch.linspace(-1.0, 1.0, fresh.weight.numel()).view_as(fresh.weight))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(fresh)
    return True


class Critic:
    """Value model and optimizer."""

    def __init__(self, model: ValueModel, settings: CriticConfig, policy: ActorConfig) -> None:
        """`policy`: its warm-up, weight decay and gradient clipping are the critic's, too."""
        self.model = model
        self.settings = settings
        self._warm, self._max_norm = policy.lr_warmup_steps, policy.max_grad_norm
        self._bootstraps = policy.truncated_samples == "bootstrap"
        self._is_scaled = policy.reward_scaling == "running"
        self.running: dict[str, Tensor] = {RETURNS: empty()}  # the policy's, which checkpoints hold
        self.optimizer = torch.optim.AdamW(
            list(model.parameters().values()), lr=settings.lr, weight_decay=policy.weight_decay
        )

    def predict(self, batch: Batch, indices: Sequence[int]) -> dict[int, Tensor]:
        """Item index -> (K,) values of all its sampled tokens, masked ones too: they bootstrap those before them.

        With actor.truncated_samples = "bootstrap" K + 1 of a sample that was cut off: also of the state after it.
        """
        items = [batch.items[i] for i in indices]
        places = [self._valued_places(item) for item in items]
        pieces = [
            replace(piece, targets_K=torch.zeros_like(piece.places_K))
            for item, at in zip(items, places, strict=True)
            for piece in item.pieces(at)
        ]
        values_N = self.model.values(pieces).detach().cpu() * self.scale
        return dict(zip(indices, torch.split(values_N, [len(at) for at in places]), strict=True))

    @property
    def scale(self) -> float:
        """What the model's outputs are multiplied by to be values: the root mean square of the returns, or 1."""
        return deviation(self.running[RETURNS], about=0.0) if self._is_scaled else 1.0

    def rescale(self, batch: Batch, total: Total) -> None:
        """Take the returns of a batch into the scale. The head is divided by its growth, so that no value changes
        (PopArt, arXiv 1602.07714, for the scale alone). A collective.
        """
        before, returns = self.scale, list(batch.streams["returns"].values())
        self.running[RETURNS] = merged(self.running[RETURNS], torch.cat([torch.zeros(0), *returns]), total)
        with torch.no_grad():
            self.model.model.get_output_embeddings().weight.mul_(before / self.scale)

    def _valued_places(self, item: Item) -> Tensor:
        if self._bootstraps and item.finish == Finish.LENGTH:
            return torch.cat([item.places_K, item.places_K.new_tensor([len(item.ids_T)])])
        return item.places_K

    def loss(self, batch: Batch, indices: Sequence[int], n_tokens: float) -> Tensor:
        """(): the value loss of trained tokens, divided by those of the whole minibatch."""
        items = [batch.items[i] for i in indices]
        pieces = [piece for item in items for piece in item.pieces(item.trained_places)]
        values_N = self.model.values(pieces)
        old_N, returns_N = (
            torch.cat([values[i] for i in indices]).to(values_N.device)
            for values in (batch.streams["old_values"], batch.streams["returns"])
        )
        scale = self.scale
        return value_losses(values_N, old_N / scale, returns_N / scale, self.settings.eps_clip).sum() / n_tokens

    def grad_norm(self) -> float:
        """Norm of the accumulated gradient (a collective when sharded)."""
        return float(whole(self._norm()))

    def _norm(self) -> Tensor:
        return get_total_norm([p.grad for p in self.model.parameters().values() if p.grad is not None])

    def step(self, version: int, norm: float) -> None:
        """Clip the gradient, whose norm is given, and step. The learning rate warms up linearly."""
        warm = self._warm
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.lr * min((version + 1) / warm, 1.0) if warm else self.settings.lr
        if norm + CLIP_EPSILON > self._max_norm:
            clip_grads_with_norm_(self.model.parameters().values(), self._max_norm, torch.tensor(norm))
        self.optimizer.step()


def value_losses(values_N: Tensor, old_N: Tensor, returns_N: Tensor, eps_clip: float | None) -> Tensor:
    """(N,) half the squared error; clipped: the larger of both errors with v and clip(v, old - eps, old + eps)."""
    plain_N = (values_N - returns_N).square()
    if eps_clip is None:
        return plain_N / 2
    clipped_N = torch.clamp(values_N, old_N - eps_clip, old_N + eps_clip)
    return torch.maximum(plain_N, (clipped_N - returns_N).square()) / 2


@dataclass(frozen=True, slots=True)
class ValueFigures:
    """Sums over the trained tokens of a batch, before its update; they add up over ranks."""

    n: float
    returns: float
    returns_squared: float
    error: float
    error_squared: float

    def flat(self) -> dict[str, float]:
        """returns_mean, and explained_variance = 1 - var(returns - values) / var(returns) where returns vary."""
        mean, off = self.returns / self.n, self.error / self.n
        variance = self.returns_squared / self.n - mean**2
        residual = self.error_squared / self.n - off**2
        return {"returns_mean": mean} | ({"explained_variance": 1 - residual / variance} if variance > 1e-12 else {})


def fill_returns(batch: Batch, rewards: Sequence[Tensor], values: Mapping[int, Tensor], settings: ActorConfig) -> None:
    """Set token advantages, returns and old values of the items with values. The reward follows the last sampled token
    of each trajectory; `rewards`: of each item one, or one a trajectory. A value more than tokens is that of the state
    after the last one, which bootstraps it.
    """
    for index in values:
        item = batch.items[index]
        values_K, after = torch.split(values[index].double(), [item.n_sampled, len(values[index]) - item.n_sampled])
        rewards_K, counts = torch.zeros_like(values_K), item.counts(item.places_K)
        rewards_K[torch.tensor(counts).cumsum(0) - 1] = rewards[index]
        rewards_K += item.fields.get(TOKEN_REWARD, 0.0)
        if index in batch.streams["token_rewards"]:  # the KL from the reference, of trained tokens
            rewards_K[item.trained_K] += batch.streams["token_rewards"][index].double()
        ends = [0.0] * (len(counts) - 1) + [float(after.sum())]
        parts = zip(torch.split(rewards_K, counts), torch.split(values_K, counts), ends, strict=True)
        made = [generalized_advantages(*one, discount=settings.discount, lam=settings.gae_lambda) for one in parts]
        advantages_K, returns_K = (torch.cat(values) for values in zip(*made, strict=True))
        batch.streams["token_advantages"][index] = advantages_K[item.trained_K].float()
        batch.streams["returns"][index] = returns_K[item.trained_K].float()
        batch.streams["old_values"][index] = values[index][: item.n_sampled][item.trained_K]


def figures(batch: Batch) -> ValueFigures:
    """Of this rank's share."""
    if not batch.streams["returns"]:
        return ValueFigures(0.0, 0.0, 0.0, 0.0, 0.0)
    returns_N = torch.cat(list(batch.streams["returns"].values())).double()
    error_N = returns_N - torch.cat(list(batch.streams["old_values"].values())).double()
    return ValueFigures(
        float(len(returns_N)),
        float(returns_N.sum()),
        float(returns_N.square().sum()),
        float(error_N.sum()),
        float(error_N.square().sum()),
    )
