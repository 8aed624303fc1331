"""Metrics of a training step, reduced over ranks and watched; without a value a metric is left out."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

import torch
from torch import Tensor

from actors.learner.algorithms.fused import Mismatch, effective_share
from actors.learner.algorithms.losses import k3
from actors.learner.batching import Batch, Item
from actors.learner.link.rendezvous import LearnerRanks
from areal_bus.config.names.engines import kind_of
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.limits import MASKED_SHARE
from areal_bus.messages import Finish


@dataclass(slots=True)
class MetricSums:
    """Sums over items, micro-batches and ranks."""

    items: float = 0
    reward: float = 0
    judged: float = 0
    correct: float = 0
    completed: float = 0  # right, and ended by an accepted stop
    truncated: float = 0
    repeated: float = 0  # left out, as they repeat themselves
    filtered: float = 0  # items, where such answers are looked for
    groups: float = 0
    zero_groups: float = 0
    tokens: float = 0
    masked: float = 0  # too old, with or without signal
    skipped: float = 0  # not too old, but their group has no signal
    trained: float = 0
    computed: float = 0  # tokens computed with a gradient, prompts included
    forward: float = 0  # tokens of passes without a gradient before the update
    measured: float = 0  # trained tokens with a known mismatch: those read before the first optimizer step
    lag: float = 0  # over trained tokens
    kl: float = 0
    weight: float = 0
    weight_squared: float = 0
    entropy: float = 0
    clipped: float = 0
    loss: float = 0
    kl_ref: float = 0
    with_ref: float = 0  # trained tokens with a log-prob of the reference model
    kl_teacher: float = 0
    with_teacher: float = 0


@dataclass(slots=True)
class SourceSums:
    """Sums over the items of one [[data.source]]."""

    items: float = 0
    reward: float = 0
    tokens: float = 0
    truncated: float = 0
    trained: float = 0  # tokens whose entropy is known, in all passes
    entropy: float = 0


@dataclass(slots=True)
class StepMetrics:
    """Collects the metrics of one step on one rank; `reduce` combines the ranks."""

    sums: MetricSums
    n_epochs: int = 1  # passes over the trained tokens
    lag_max: float = 0
    mismatch_max: float = 0
    user: dict[str, float] = field(default_factory=dict)  # sums of the statistics of a user's loss
    by_source: dict[str, SourceSums] = field(default_factory=dict)  # all of the run, the same on each rank

    def add(self, mismatch: Mismatch) -> None:
        self.mismatch_max = max(self.mismatch_max, mismatch.largest)
        self.sums.measured += mismatch.n
        self.sums.kl += mismatch.kl
        self.sums.weight += mismatch.weight
        self.sums.weight_squared += mismatch.weight_squared

    def add_entropy(self, items: Sequence[Item], entropy_N: Tensor) -> None:
        """Add the entropies of one micro-batch: those of the trained tokens of these items, in order."""
        if not self.by_source:
            self.sums.entropy += float(entropy_N.sum())
            return
        by_item = torch.split(entropy_N, [item.n_trained for item in items])
        for item, entropy in zip(items, torch.stack([part.sum() for part in by_item]).tolist(), strict=True):
            self.sums.entropy += entropy
            if item.source in self.by_source:
                self.by_source[item.source].entropy += entropy
                self.by_source[item.source].trained += item.n_trained

    def add_divergences(self, logprobs_N: Tensor, streams: Mapping[str, Tensor], apart_N: Tensor | None) -> None:
        """Add the KL of one micro-batch from the frozen models; `apart_N`: divergences over the teacher's words."""
        if "reference" in streams:
            self.sums.kl_ref += float(k3(logprobs_N, streams["reference"]).sum())
            self.sums.with_ref += len(logprobs_N)
        if apart_N is not None or "teacher" in streams:
            from_teacher_N = k3(logprobs_N, streams["teacher"]) if apart_N is None else apart_N.detach()
            self.sums.kl_teacher += float(from_teacher_N.sum())
            self.sums.with_teacher += len(logprobs_N)

    def reduce(self, ranks: LearnerRanks) -> None:
        """Sums and maxima over the ranks, in place (a collective)."""
        names = [one.name for one in fields(MetricSums)]
        n = len(names)
        of_sources = [number for one in self.by_source.values() for number in astuple(one)]
        totals = ranks.sum([*(getattr(self.sums, name) for name in names), *self.user.values(), *of_sources])
        self.sums = MetricSums(*totals[:n])
        rest = iter(totals[n:])
        self.user = {name: next(rest) for name in self.user}
        self.by_source = {name: SourceSums(*(next(rest) for _ in fields(SourceSums))) for name in self.by_source}
        self.lag_max, self.mismatch_max = ranks.max([self.lag_max, self.mismatch_max])

    def flat(self) -> dict[str, float]:
        """The metrics by their names in docs/journal.md. I12: n_tokens = trained + masked + skipped."""
        s = self.sums
        passed = s.trained * self.n_epochs
        stats = {
            "n_tokens": s.tokens,
            "n_tokens_trained": s.trained,
            "n_tokens_masked": s.masked,
            "n_tokens_skipped": s.skipped,
            "n_tokens_computed": s.computed,
            "n_tokens_forward": s.forward,
        }
        shares = [
            ("reward", s.reward, s.items),
            ("correct", s.correct, s.judged),
            ("completed_accuracy", s.completed, s.judged),
            ("truncated_share", s.truncated, s.items),
            ("repeated_share", s.repeated, s.filtered),
            ("masked_share", s.masked, s.tokens),
            ("zero_advantage_share", s.zero_groups, s.groups),
            ("lag_mean", s.lag, s.trained),
            ("mismatch_kl", s.kl, s.measured),
            ("entropy", s.entropy, passed),
            ("clip_share", s.clipped, passed),
            ("loss", s.loss, passed),
            ("kl_ref", s.kl_ref, s.with_ref),
            ("kl_teacher", s.kl_teacher, s.with_teacher),
            *((f"loss/{name}", value, passed) for name, value in self.user.items()),
            *((f"entropy/{name}", one.entropy, one.trained) for name, one in self.by_source.items()),
            *((f"reward/{name}", one.reward, one.items) for name, one in self.by_source.items()),
            *((f"length/{name}", one.tokens, one.items) for name, one in self.by_source.items()),
            *((f"truncated_share/{name}", one.truncated, one.items) for name, one in self.by_source.items()),
        ]
        stats |= {name: part / whole for name, part, whole in shares if whole}
        if s.trained:
            stats["lag_max"] = self.lag_max
        if s.measured:
            stats["mismatch_max"] = self.mismatch_max
            stats["ess"] = effective_share(s.weight, s.weight_squared, int(s.measured))
        return {name: float(value) for name, value in stats.items()}


def count(batch: Batch, sources: Iterable[str] = ()) -> StepMetrics:
    """Rewards, shares and token counts of this rank, which need no forward pass. `sources`: names of all of the run."""
    if batch.signal is None:
        raise ValueError("missing advantages in the batch: call compute_advantages_and_returns before ppo_update")
    computed = batch.signal if batch.computed is None else batch.computed
    metrics = StepMetrics(MetricSums(), by_source={name: SourceSums() for name in sources})
    s = metrics.sums
    trained: list[Item] = []
    with_signal: set[int] = set()
    for item, has_signal, is_computed in zip(batch.items, batch.signal.tolist(), computed.tolist(), strict=True):
        s.items += 1
        s.reward += item.reward
        s.judged += item.correct is not None
        s.correct += item.correct is True
        s.completed += item.correct is True and item.finish == Finish.STOP
        s.truncated += item.finish == Finish.LENGTH
        s.tokens += item.n_sampled
        if (own := metrics.by_source.get(item.source)) is not None:
            own.items += 1
            own.reward += item.reward
            own.tokens += item.n_sampled
            own.truncated += item.finish == Finish.LENGTH
        s.masked += item.n_sampled - item.n_trained
        if has_signal:
            with_signal.add(item.group)
        if not is_computed:
            s.skipped += item.n_trained
        else:
            s.trained += item.n_trained
            trained.append(item)
    if s.trained:
        lags_N = torch.cat([item.lags_K for item in trained])[torch.cat([item.trained_K for item in trained])]
        s.lag, metrics.lag_max = float(lags_N.sum()), float(lags_N.max())
    if batch.repeated is not None:
        s.repeated, s.filtered = float(batch.repeated.sum()), s.items
    s.groups = len(batch.groups)
    s.zero_groups = s.groups - len(with_signal)
    return metrics


class SignalWarnings:
    """Warns once if more than a tenth of the sampled tokens are masked."""

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self._warned = False

    def look(self, batch: Batch, metrics: StepMetrics, *, eta: int) -> None:
        """Check one step: `metrics` are reduced over the ranks, `batch` is this rank's share."""
        sums = metrics.sums
        if sums.tokens and sums.masked / sums.tokens > MASKED_SHARE and not self._warned:
            self._warned = True
            self._warn(
                f"{sums.masked / sums.tokens:.0%} of the sampled tokens are older than eta = {eta} versions and train "
                f"nothing: rollout.max_head_offpolicyness = {mending_eta(batch)} would keep that below "
                f"{MASKED_SHARE:.0%}"
            )


def mending_eta(batch: Batch) -> int:
    """Smallest eta under which at most a tenth of this share's sampled tokens would be masked."""
    lags = torch.cat([item.lags_K for item in batch.items]).sort().values if batch.items else torch.zeros(1)
    allowed = int(MASKED_SHARE * len(lags))
    return int(lags[len(lags) - 1 - allowed])


MOST_KL = {"float32": 1e-3}  # mean over the trained tokens
ROUGH = 0.1  # for bfloat16 and float16, in which server and learner round differently


class ServerCheck:
    """One comparison, of the first update whose tokens were all sampled by the version that the learner holds."""

    def __init__(self, config: Config) -> None:
        lora, kind = config.actor.lora, kind_of(config.rollout.engine)
        is_checked = not kind.is_probed and not kind.makes_up_tokens
        self._is_due = is_checked and (lora is None or not lora.dropout)
        self._engine, self._family = config.rollout.engine, config.model.path
        self._most = MOST_KL.get(config.model.dtype, ROUGH)

    def look(self, metrics: StepMetrics) -> None:
        """`metrics` of an update, over all ranks. Raises ConfigError."""
        measured = metrics.sums.measured
        if not self._is_due or not measured or metrics.lag_max:
            return
        self._is_due = False
        kl = metrics.sums.kl / measured
        if not kl <= self._most:  # NaN differs, too
            raise ConfigError(
                f"model family refused: log-probs of the engine {self._engine} differ from the learner's at the same "
                f"weights, {self._family}: a KL of {kl:.2g} over {measured:g} tokens (at most {self._most:g}), largest "
                f"difference {metrics.mismatch_max:.2g}; nothing was published; choose another model or engine, "
                "or upgrade the server"
            )
