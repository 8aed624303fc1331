"""Settings of the head: the part of the config that it uses."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

from areal_bus.core.evaluation import EvaluationSet
from areal_bus.core.parts.sample_limits import NO_LIMITS, SampleLimits
from areal_bus.core.parts.split import RankPool, Split
from areal_bus.core.parts.stages import Stage, stage_at
from areal_bus.core.parts.staleness import StalenessPolicy
from areal_bus.core.planner.split_planner import PlannerRules
from areal_bus.messages import Partial, Sampled, Scored, VerdictStatus

MAX_REISSUES = 3  # policy `drop`: how often a row is issued again


@dataclass(frozen=True, slots=True)
class HeadRules:
    """The part of the config that the head uses."""

    batch_size: int  # B
    eta: int
    n_samples: int
    total_steps: int
    n_generators: int
    n_rewards: int
    n_learners: int
    silent_s: float
    assemble_s: float
    push_timeout_s: float
    policy: StalenessPolicy = StalenessPolicy.MASK
    max_reissues: int = MAX_REISSUES
    max_refill: int = 0  # groups without signal that are replaced for a batch
    drop_last: bool = False
    drop_long_prompts: bool = False  # a prompt over the limit is refunded, and is no sign that something is wrong
    checkpoint_every: int = 0  # versions between checkpoints; 0: none by steps
    checkpoint_keep: int = 1  # checkpoints that stay
    evaluate_before: bool = False
    evaluate_after: bool = False
    evaluate_every: int = 0  # versions between evaluations in training; 0: none
    evaluate_share: float = 1.0  # of a generator's slots that an evaluation in training may hold
    evaluate_metric: str = "avg_at_k"
    evaluate_metric_set: str = ""
    evaluate_patience: int = 0  # evaluations without a better metric until training ends; 0: it does not
    on_collapse: str = "warn"  # or "stop", "rollback"
    evaluation_sets: tuple[EvaluationSet, ...] = ()
    partial_bytes: int = 256 << 20  # of what generators report of samples under way
    lease_secret: bytes = field(default=b"", repr=False)  # of `LeaseIds`
    on_timeout: float | None = None  # reward of a sample whose verdict is a timeout; None: it has none
    on_error: float | None = None
    partial_groups: bool = False  # samples without a reward are left out, the others of their group may be trained
    compares: bool = False  # reward.group: a complete group gets its rewards from one more verdict
    context_parallel: int = 1  # learner ranks that train one share of a batch together
    pool: RankPool | None = None  # ranks that may change their role; None: the split stays
    split_number: int = 0  # of the split that this head starts with ...
    split_since: int = 0  # ... and the version at which it began
    planner: PlannerRules | None = None  # of [topology.adapt]; None: it is off
    schedule: tuple[tuple[int, int], ...] = ()  # (step, learners), by step: splits that are wanted from a step on
    stages: tuple[Stage, ...] = ()  # by their first version; empty: n_samples holds throughout
    max_restarts: int = 5  # crashes of an actor in a row after which its supervisor ends the job
    capacity: int | None = None  # samples that a generator is leased at once, whatever it asks for; None: no limit
    limits: SampleLimits = NO_LIMITS

    @classmethod
    def of(cls, source: object, **others: Any) -> "HeadRules":
        """The rules that `source` has as attributes of the same names, and `others` instead or besides."""
        own = {rule.name: getattr(source, rule.name) for rule in fields(cls) if hasattr(source, rule.name)}
        return cls(**own | others)

    def samples_at(self, version: int, source: str = "") -> int:
        """Samples of a group whose prompt is admitted at this version, of a row of this source."""
        return stage_at(self.stages, version, source).n_samples if self.stages else self.n_samples

    def most_samples_at(self, version: int) -> int:
        """Of the largest group of any source at this version."""
        return max(stage_at(self.stages, version).group_sizes) if self.stages else self.n_samples

    def mean_samples_at(self, version: int) -> float:
        """Over the prompts of all sources at this version."""
        return stage_at(self.stages, version).mean_samples if self.stages else self.n_samples

    def check_sample(
        self, sample: Scored | Partial, born: int, source: str, *, is_guests: bool, most: int | None = None
    ) -> None:
        """Raises ImpossibleEvent for a sample over the limits of the run. `born`: the version of its stage; `source`:
        that of its row, or its evaluation set; `most`: the own limit of that set.
        """
        self.limits.check(sample, self._stage(born, source, most), is_guests=is_guests)

    def check_count(self, report: Sampled, born: int, source: str, *, most: int | None = None) -> None:
        """Raises ImpossibleEvent for a report of more tokens than a sample may have; as `check_sample`."""
        self.limits.check_count(report, self._stage(born, source, most))

    def _stage(self, version: int, source: str, most: int | None) -> Stage | None:
        stage = stage_at(self.stages, version, source) if self.stages else None
        return stage if stage is None or most is None else replace(stage, max_new_tokens=most)

    @property
    def split(self) -> Split:
        """The split that this head starts with."""
        return Split(self.n_learners, self.n_generators, self.split_number, self.split_since)

    def in_split(self, split: Split) -> "HeadRules":
        """The rules of a head that starts with this split."""
        return replace(
            self,
            n_learners=split.learners,
            n_generators=split.generators,
            split_number=split.number,
            split_since=split.since,
        )

    @property
    def least_samples(self) -> int:
        """Samples of the smallest group of any stage and source."""
        return min((n for stage in self.stages for n in stage.group_sizes), default=self.n_samples)

    def reward_of(self, status: str, reward: float) -> float | None:
        """The reward of a training sample: its value, or the configured one for its verdict; None if it has none."""
        if status == VerdictStatus.VALUE:
            return reward
        return self.on_timeout if status == VerdictStatus.TIMEOUT else self.on_error
