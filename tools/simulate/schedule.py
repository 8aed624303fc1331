"""What is played: the settings, speeds and lengths that decide a ring's throughput; knows no time and no event."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from areal_bus.core.staleness import StalenessPolicy
from areal_bus.workload import SpeedLaw


class Law(Protocol):
    """Lengths of answers."""

    def draw(self, uniform: float) -> int:
        """The length at this quantile, uniform in [0, 1); a token or more."""

    def mean(self, most: int) -> float:
        """Of answers that are cut at `most` tokens."""


@dataclass(frozen=True, slots=True)
class ObservedLengths:
    """Lengths that were seen, each as likely as the others."""

    lengths: Sequence[int]  # ascending

    def draw(self, uniform: float) -> int:
        return self.lengths[int(uniform * len(self.lengths))]

    def mean(self, most: int) -> float:
        return sum(min(length, most) for length in self.lengths) / len(self.lengths)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One ring. All generators are alike; the learner ranks count as one learner."""

    batch_size: int  # B
    n_samples: int
    eta: int
    policy: StalenessPolicy
    on_update: Literal["recompute", "keep", "drain"]
    n_generators: int
    slots: int  # of a generator
    lengths: Law
    most_tokens: int  # that cut an answer
    prompt_tokens: int
    speeds: SpeedLaw  # of a generator
    train_tokens_per_s: float  # sampled tokens of a batch, over all learner ranks
    step_s: float  # of a training step, whatever its size
    push_s: float  # from the end of an update until all its weights are there, beside decoding
    reward_s: float  # from a sample's last token until it is scored
    groups_waiting: int = 2  # beside the samples in the slots, at most
    shares_device: bool = False  # the generator and the learner halve one device while both work

    @property
    def most_load(self) -> int:
        """Samples with which a generator is still given another group."""
        return self.slots + (self.groups_waiting - 1) * self.n_samples

    @property
    def generation_alone(self) -> float:
        """Tokens a second of all generators, their slots always full and no update on the way."""
        mean, speeds = self.lengths.mean(self.most_tokens), self.speeds
        token_s = speeds.step_s(self.slots) / self.slots + speeds.prefill_s(self.prompt_tokens) / (
            self.n_samples * mean
        )
        return self.n_generators / token_s

    @property
    def training_alone(self) -> float:
        """Tokens a second of the learner with a batch always ready."""
        batch = self.batch_size * self.n_samples * self.lengths.mean(self.most_tokens)
        return batch / (self.step_s + batch / self.train_tokens_per_s)

    @property
    def bound(self) -> float:
        """What no eta exceeds in the long run. On one device the halves take turns: their times add."""
        halves = self.generation_alone, self.training_alone
        return 1 / sum(1 / half for half in halves) if self.shares_device else min(halves)
