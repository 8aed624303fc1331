"""What the parts of an algorithm receive and return: N trained tokens (without masked ones), M trajectories."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from areal_bus.config.learner import ActorConfig


class Streams(dict[str, Tensor]):
    """Numbers of each token by name."""

    def __missing__(self, name: str) -> Tensor:
        raise LookupError(f"missing stream {name!r}: the part must declare it with @needs({name!r})")


@dataclass(frozen=True, slots=True)
class Trajectories:
    """What an advantage estimator sees: all trajectories of this rank, in whole groups."""

    rewards_M: Tensor  # float64, after reward shaping
    groups_M: Tensor  # int64: number of the group
    lengths_M: Tensor  # int64: sampled tokens, also those that are masked
    streams: Streams = field(default_factory=Streams)  # (M,) by name: the mean over the tokens of each trajectory
    has_roles: bool = False  # a group is of one role of a prompt; one sample may have it alone


@dataclass(frozen=True)
class Tokens:
    """What a loss and a correction see: the trained tokens of one micro-batch, trajectory by trajectory."""

    logprobs_N: Tensor  # current parameters; carries the gradient
    anchor_N: Tensor  # log-probs that ratios are relative to: proximal, or those of the sampler; detached
    prox_N: Tensor  # proximal log-probs; equal to `behav_N` when they are not computed; detached
    behav_N: Tensor  # log-probs that the sampler recorded
    advantages_N: Tensor
    lags_N: Tensor  # int64: versions between the sampler and the parameters before this update
    sequences_N: Tensor  # int64, ascending: index of the token's trajectory in the micro-batch
    lengths_M: Tensor  # int64: trained tokens of each trajectory
    streams: Streams = field(default_factory=Streams)  # (N,) by name: fields of the workflow, streams of `needs`
    entropy_N: Tensor | None = None  # of the current policy; detached

    @cached_property
    def log_ratio_N(self) -> Tensor:
        """log of current over anchor, with gradient."""
        return self.logprobs_N - self.anchor_N

    @cached_property
    def ratio_N(self) -> Tensor:
        """Current over anchor, with gradient."""
        return self.log_ratio_N.exp()

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """(M,) mean over the trained tokens of each trajectory."""
        return self.sequence_sum(values_N) / self.lengths_M

    def sequence_sum(self, values_N: Tensor) -> Tensor:
        """(M,) sum over the trained tokens of each trajectory."""
        return values_N.new_zeros(len(self.lengths_M)).index_add(0, self.sequences_N, values_N)


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts of a whole minibatch, over all micro-batches and learner ranks."""

    n_tokens: float
    n_sequences: float


Statistics = dict[str, Tensor]  # name -> (N,) per-token values; their mean over trained tokens is reported
Advantage = Callable[[Trajectories, ActorConfig], Tensor]  # (M,) float
Loss = Callable[[Tokens, ActorConfig], Tensor | tuple[Tensor, Statistics]]  # (N,) loss of each token, with gradient
Correction = Callable[[Tokens, ActorConfig], Tensor]  # (N,) weight of each token's loss, detached
Aggregation = Callable[[Tensor, Totals, ActorConfig], Tensor]  # lengths_M -> (M,) weight of each token of a trajectory


Make = Callable[[Mapping[str, Tensor], ActorConfig], Tensor]  # streams of one trajectory -> (n_trained,) numbers
Part = TypeVar("Part", bound=Callable[..., Any])


def needs(*names: str, **makers: Make) -> Callable[[Part], Part]:
    """Declares the streams that a part of an algorithm reads as `streams[name]`.

    `names`: log-probs of models ("prox", "reference", "teacher"), and fields that the workflow or the loop adds.
    `makers`: functions of one trajectory's streams and the settings that make a stream before the advantages. They see
    the streams of `names`, and "behav" (the sampler's log-probs), "lags" and "reward".
    """

    def declare(part: Part) -> Part:
        part.__dict__["needed_streams"], part.__dict__["made_streams"] = names, makers
        return part

    return declare


def select(values_M: Tensor, tokens: Tokens) -> Tensor:
    """(N,) the value of each token's trajectory."""
    return values_M[tokens.sequences_N]


def sequences_of(lengths_M: Tensor) -> Tensor:
    """(N,) index of each token's trajectory."""
    return torch.arange(len(lengths_M), device=lengths_M.device).repeat_interleave(lengths_M)
