"""The input of a simulation: settings, speeds and lengths, and the throughput bounds that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from areal_bus.config.rollout import OnUpdate
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_lab.ring.workload import SpeedLaw
from areal_lab.simulate.cores import Cores


class LengthModel(Protocol):
    """Distribution of the lengths of answers."""

    def draw(self, uniform: float) -> int:
        """The length at the quantile `uniform` in [0, 1); at least 1 token."""

    def mean(self, most: int) -> float:
        """Mean length of answers that are truncated at `most` tokens."""


@dataclass(frozen=True, slots=True)
class ObservedLengths:
    """The lengths of a run, all with equal probability."""

    lengths: Sequence[int]  # ascending

    def draw(self, uniform: float) -> int:
        return self.lengths[int(uniform * len(self.lengths))]

    def mean(self, most: int) -> float:
        return sum(min(length, most) for length in self.lengths) / len(self.lengths)


@dataclass(frozen=True, slots=True)
class Schedule:
    """One ring. All generators are equal; the learner ranks count as one learner."""

    batch_size: int  # B
    n_samples: int
    eta: int
    policy: StalenessPolicy
    on_update: OnUpdate
    n_generators: int
    slots: int  # of a generator
    lengths: LengthModel
    max_tokens: int  # limit of an answer
    prompt_tokens: int
    speeds: SpeedLaw  # of a generator
    train_tokens_per_s: float  # sampled tokens of a batch, over all learner ranks
    step_s: float  # fixed part of a training step
    push_s: float  # from the end of an update to the arrival of its weights
    reward_s: float  # from a sample's last token to its score
    groups_waiting: int = 2  # at most, in addition to the samples in the slots
    cores: Cores | None = None  # that the actors share; None: each has its own device and enough cores

    @property
    def max_load(self) -> int:
        """Up to this number of samples a generator gets another group."""
        return self.slots + (self.groups_waiting - 1) * self.n_samples

    @property
    def generation_alone(self) -> float:
        """Tokens a second of all generators with full slots and without updates."""
        mean, speeds = self.lengths.mean(self.max_tokens), self.speeds
        token_s = speeds.step_s(self.slots) / self.slots + speeds.prefill_s(self.prompt_tokens) / (
            self.n_samples * mean
        )
        return self.n_generators / token_s

    @property
    def training_alone(self) -> float:
        """Tokens a second of the learner when a batch is always ready."""
        batch = self.batch_size * self.n_samples * self.lengths.mean(self.max_tokens)
        return batch / self.training_s(batch, self.batch_size)

    def training_s(self, n_tokens: float, n_groups: int) -> float:
        """Time of a training step over these sampled tokens and the prompts of their groups."""
        return self.step_s + (n_tokens + n_groups * self.prompt_tokens) / self.train_tokens_per_s

    @property
    def bound(self) -> float:
        """Upper bound of the throughput for every eta. On shared cores, at most what all cores can do."""
        alone = min(self.generation_alone, self.training_alone)
        core_s = self.core_s_per_token
        return min(alone, self.cores.n / core_s) if self.cores is not None and core_s > 0 else alone

    @property
    def core_s_per_token(self) -> float:
        """Core seconds of all actors for each token, with full slots. 0 without shared cores."""
        cores = self.cores
        if cores is None:
            return 0.0
        of_generators = cores.generator * self.n_generators / self.generation_alone
        of_learners = cores.learner * cores.learners / self.training_alone
        return of_generators + of_learners + cores.sample_s / self.lengths.mean(self.max_tokens)
