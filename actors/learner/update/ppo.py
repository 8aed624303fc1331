"""One PPO update: learning rate, loss, backward pass, gradient clipping and optimizer step."""

import math
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import NoReturn, Protocol

import torch
from loguru import logger
from safetensors import SafetensorError
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from actors.learner.algorithms.corrections import second_moment_threshold
from actors.learner.algorithms.fused import effective_share, mismatch
from actors.learner.algorithms.parts import Streams, Totals, sequences_of
from actors.learner.algorithms.registry import find_algorithm
from actors.learner.algorithms.running import REWARDS, merged, normalising
from actors.learner.batching import Batch, Minibatch, minibatches, record_batch, save_batch
from actors.learner.model.chunked_head import GivenTeacher, Teacher
from actors.learner.model.critic import Critic, ValueFigures, ValueModel, figures
from actors.learner.model.frozen_model import FrozenModel, FrozenModels
from actors.learner.model.policy import Policy, whole
from actors.learner.model.remote_teacher import RemoteTeacher
from actors.learner.update.advantage_stage import fill_advantages, make_streams, rewards_of
from actors.learner.update.forward_passes import ForwardPasses, pieces
from actors.learner.update.metrics import ServerCheck, SignalWarnings, StepMetrics, count
from actors.learner.update.objective import MicroBatchTokens, micro_batch_loss
from actors.learner.update.optimizers import HOST, LearningRates, check_states, make_optimizer, move_states, offload
from actors.models.packed_row import SequencePiece
from actors.runtime.context import HeartbeatState
from actors.runtime.stages import stages_of
from areal_bus.config.algorithms import keeps_reference
from areal_bus.config.learner import ActorConfig
from areal_bus.config.sections import Config
from areal_bus.core.events import Event
from areal_bus.core.parts.collapse import Rollback
from areal_bus.errors import ImpossibleEvent, NonFinite
from areal_bus.storage.journal import Journal


def learning_rate(actor: ActorConfig, *, step: int, total: int) -> float:
    """Learning rate of step `step` of `total`: linear warm-up, then constant, or down to min_lr_ratio at `total`."""
    if step < actor.lr_warmup_steps:
        return actor.lr * (step + 1) / actor.lr_warmup_steps
    after = max(total - actor.lr_warmup_steps, 1)
    done = min((step - actor.lr_warmup_steps) / after, 1.0)
    if actor.lr_schedule == "constant":
        return actor.lr
    share = 1 - done if actor.lr_schedule == "linear" else 0.5 * (1 + math.cos(math.pi * done))
    return actor.lr * (actor.min_lr_ratio + (1 - actor.min_lr_ratio) * share)


def update_seed(seed: int, version: int, rank: int) -> int:
    """Of torch's generator in one update of one rank, so that equal and resumed runs draw the same dropout."""
    return random.Random(f"update {seed} {version} {rank}").getrandbits(63)


def epoch_order(seed: int, version: int, epoch: int, n_groups: int) -> list[int]:
    """The groups of a batch in the order of a further pass, the same on every rank and after a resume."""
    return random.Random(f"epoch {seed} {version} {epoch}").sample(range(n_groups), n_groups)


CLIP_EPSILON = 1e-6  # clip_grads_with_norm_ adds it to the norm

Publish = Callable[[int, dict[str, float]], None]


@dataclass(frozen=True, slots=True)
class _OptimizerStep:
    """One optimizer step."""

    norm: float  # of the gradient, before it is clipped
    denominator: float  # divides the sum of the token losses
    lr_share: float  # of the scheduled learning rate
    value_loss: float = 0.0
    critic_norm: float = 0.0  # of the critic's gradient


@dataclass(frozen=True, slots=True)
class UpdateContext:
    """Where an update reports. An exception of `publish` or `tick` ends the update."""

    journal: Journal
    heartbeat: HeartbeatState  # its progress grows with each micro-batch
    folder: Path  # of the run
    publish: Publish = lambda version, stats: None  # at the end of every update
    tick: Callable[[], None] = lambda: None  # between micro-batches


class UpdateStandIn(Protocol):
    """Takes the place of passes and optimizer steps: [learner.simulated]."""

    def run(self, batch: Batch, weights: Iterable[Tensor], *, lr: float, tick: Callable[[], None]) -> None:
        """Change the weights in place. `tick` is called now and then; it may raise."""


class PPOActor:
    """Policy, optimizer and version: `version` = number of finished updates."""

    def __init__(
        self,
        policy: Policy,
        config: Config,
        context: UpdateContext,
        *,
        critic: ValueModel | None = None,
        frozen: FrozenModels | None = None,
        stand_in: UpdateStandIn | None = None,
    ) -> None:
        """`critic`: for actor.advantage = "gae". `stand_in` replaces the passes and optimizer steps."""
        if (config.actor.advantage == "gae") != (critic is not None):
            raise ValueError('a critic is for actor.advantage = "gae", which needs one')
        self.policy = policy
        self.frozen = frozen or FrozenModels()  # as the algorithm needs them
        if isinstance(self.frozen.teacher, RemoteTeacher):
            self.frozen.teacher.tick = context.tick
        self.version = 0
        self.rollback: Rollback | None = None  # bounds the learning rate
        self._config = config
        self._settings = config.actor
        self.algorithm = find_algorithm(config.actor)
        self._passes = ForwardPasses(policy, stages_of(config), self._beat)
        self._ranks = policy.ranks
        self._context = context
        self._journal = context.journal
        self._watch = SignalWarnings(self._warn)
        self._server_check = ServerCheck(config)
        self._stand_in = stand_in
        self._n_applied = 0  # optimizer steps of the current update
        self.critic = None if critic is None else Critic(critic, config.critic, config.actor)
        if self.critic is not None:
            self.critic.running = policy.running
        self.optimizer = make_optimizer(policy, config.actor)
        self._optimizers = [self.optimizer] + ([] if self.critic is None else [self.critic.optimizer])
        if config.actor.offload == "optimizer":
            for one in self._optimizers:
                offload(one, policy.device)
        self._rates = LearningRates(self.optimizer, config.actor.lr)

    def compute_advantages_and_returns(self, batch: Batch) -> Batch:
        """Fill in advantages, signals and (unless the first pass gives them) proximal log-probs; returns the batch."""
        with self._journal.span("prox"):
            self._fill_streams(batch)
            values = None if self.critic is None else self._passes.values(self.critic, batch, self.version)
            fill_advantages(batch, self.algorithm, self._scaled(batch), self._ranks.sum, values)
            if self.critic is not None and self._settings.reward_scaling == "running":
                self.critic.rescale(batch, self._ranks.sum)
            if self.algorithm.needs_prox_pass and not self.algorithm.needs_prox_first and self._stand_in is None:
                self._compute_prox(batch)
        return batch

    def _scaled(self, batch: Batch) -> Config:
        """The settings for this batch: with the running mean and deviation of the rewards, itself included."""
        if self._settings.reward_scaling != "running":
            return self._config
        held, rewards = self.policy.running, rewards_of(batch, self._config)
        held[REWARDS] = merged(held[REWARDS], rewards, self._ranks.sum)
        return self._config.model_copy(update={"actor": normalising(self._settings, held[REWARDS])})

    def _fill_streams(self, batch: Batch) -> None:
        """Log-probs of all trained tokens by the frozen models and, if needed, the policy, in equal micro-batches."""
        trained = [i for i, item in enumerate(batch.items) if item.n_trained]
        for name, model in self.frozen.by_stream.items():
            if name == "teacher" and not self.algorithm.needs_teacher_tokens:
                continue
            batch.streams[name] = self._passes.logprobs(model, batch, trained, self.version)
        if isinstance(self._teacher, RemoteTeacher):
            self._teacher.ask(pieces(batch, trained))
        if self.algorithm.needs_prox_first:
            batch.streams["prox"] = self._passes.logprobs(self.policy, batch, trained, self.version)
        make_streams(batch, self.algorithm)

    def ppo_update(self, batch: Batch) -> dict[str, float]:
        """One training step: an optimizer step for each minibatch that has a token to train, in each pass over the
        batch; returns its metrics.

        Raises ImpossibleEvent for a batch of another version (each batch is trained once, I4). Raises NonFinite and
        saves the batch if a loss or gradient is not finite: nothing is published. Optimizer steps before the failed one
        stay applied, so the weights belong to no version afterwards (`check_whole`).
        """
        self.check_whole()
        if batch.clock != self.version:
            raise ImpossibleEvent(f"version mismatch of a batch: clock {batch.clock}, version {self.version}")
        began = time.monotonic()
        metrics = count(batch, [source.label for source in self._config.data.source])
        metrics.sums.forward = self._passes.take_planned()
        metrics.user = dict.fromkeys(self.algorithm.statistics, 0.0)
        metrics.n_epochs = self._settings.ppo_epochs
        lr = learning_rate(self._settings, step=self.version, total=self._config.run.total_train_steps)
        lr = lr if self.rollback is None else min(lr, self.rollback.caps(self.version))
        self._rates.set(lr)
        steps = self._take_steps(batch, metrics, lr)
        check_states(self.optimizer, self._settings)
        metrics.sums.computed = self._passes.take_planned()
        if self._teacher is not None:
            if isinstance(self._teacher, FrozenModel):
                metrics.sums.forward += metrics.sums.computed  # it reads the same rows
            self._teacher.free()
        metrics.reduce(self._ranks)
        self._server_check.look(metrics)
        self._watch.look(batch, metrics, eta=self._config.rollout.max_head_offpolicyness)
        stats = metrics.flat() | {"lr": lr, "n_optimizer_steps": float(len(steps))}
        if steps:
            stats["grad_norm"] = sum(step.norm for step in steps) / len(steps)
            stats["loss_denominator"] = sum(step.denominator for step in steps) / len(steps)
            stats["lr"] = lr * (sum(step.lr_share for step in steps) / len(steps))
        if self.critic is not None:
            stats |= self._value_stats(batch, steps)
        stats["update_s"] = time.monotonic() - began
        self._n_applied = 0
        self.version += 1
        ranks = self._ranks
        if self._config.journal.replay and (ranks.context is None or ranks.context.index == 0):
            record_batch(self._context.folder, batch, share=ranks.share, n_shares=ranks.n_shares)
        self._update_reference()
        self._context.publish(self.version, stats)
        return stats

    def _take_steps(self, batch: Batch, metrics: StepMetrics, lr: float) -> list[_OptimizerStep]:
        torch.manual_seed(update_seed(self._config.run.seed, self.version, self._ranks.index))  # of adapters' dropout
        if self._stand_in is None:
            parts = (part for epoch in range(self._settings.ppo_epochs) for part in self._minibatches(batch, epoch))
            return [step for part in parts if (step := self._step(batch, part, metrics, lr)) is not None]
        with self._journal.span("backward"):
            self._stand_in.run(batch, self.policy.parameters().values(), lr=lr, tick=self._beat)
        return []

    @property
    def kept_reference(self) -> FrozenModel | None:
        """The reference model, if checkpoints hold it."""
        reference = self.frozen.reference
        return reference if isinstance(reference, FrozenModel) and keeps_reference(self._config) else None

    def _update_reference(self) -> None:
        """Every reference.update_every versions the reference becomes a copy of the policy."""
        every = self._config.reference.update_every
        if isinstance(self.frozen.reference, FrozenModel) and every and self.version % every == 0:
            self.frozen.reference.copy_from(self.policy)

    def _value_stats(self, batch: Batch, steps: Sequence[_OptimizerStep]) -> dict[str, float]:
        sums = ValueFigures(*self._ranks.sum(list(astuple(figures(batch)))))
        stats = sums.flat() if sums.n else {}
        if steps:
            stats["value_loss"] = sum(step.value_loss for step in steps) / len(steps)
            stats["critic_grad_norm"] = sum(step.critic_norm for step in steps) / len(steps)
        return stats

    def rest(self) -> None:
        """After a restore: states go where they are between steps."""
        if self._settings.offload == "optimizer":
            for one in self._optimizers:
                move_states(one, HOST)

    def check_whole(self) -> None:
        """Raises ImpossibleEvent after an update that failed half-way: its weights belong to no version."""
        if self._n_applied:
            raise ImpossibleEvent(
                f"incomplete update of version {self.version}: it broke off after {self._n_applied} optimizer steps; "
                "only whole updates are pushed and kept"
            )

    def _minibatches(self, batch: Batch, epoch: int = 0) -> list[Minibatch]:
        order = epoch_order(self._config.run.seed, self.version, epoch, batch.n_groups) if epoch else None
        return minibatches(batch, self._settings.ppo_n_minibatches, first=self._ranks.share, order=order)

    def _step(self, batch: Batch, part: Minibatch, metrics: StepMetrics, lr: float) -> _OptimizerStep | None:
        """Gradient and optimizer step of one minibatch; None if it has no token to train."""
        totals = self._totals(part)
        if totals is None:
            return None
        bound = self._m2_bound(batch, part)
        with self._journal.span("backward"):
            self.optimizer.zero_grad()
            loss, weights = 0.0, [torch.zeros(0)]
            for indices in self._passes.micro_batches(batch, part.members, self.version):
                loss += self._backward(batch, indices, totals, metrics, m2_bound=bound, weights=weights)
                self._beat()
        with self._journal.span("optimizer"):
            grads = [p.grad for p in self.policy.parameters().values() if p.grad is not None]
            norm_tensor = whole(get_total_norm(grads))
            norm = float(norm_tensor)
            total, weight, squared, n_weights = self._ranks.sum([loss, *_moments(torch.cat(weights))])
            if not (math.isfinite(norm) and math.isfinite(total)):
                self._raise_nonfinite(batch, loss=total, norm=norm)
            if norm + CLIP_EPSILON > self._settings.max_grad_norm:  # else every gradient would be multiplied by 1
                clip_grads_with_norm_(self.policy.parameters().values(), self._settings.max_grad_norm, norm_tensor)
            lr_share = 1.0
            if n_weights:  # VCPO: short steps on few effective trajectories
                lr_share = effective_share(weight, squared, int(n_weights)) ** 0.5
                self._rates.set(lr * lr_share)
            self._n_applied += 1
            if self.version >= self._config.critic.warmup_updates:
                self.optimizer.step()
        value_loss, critic_norm = (0.0, 0.0) if self.critic is None else self._critic_step(batch, part, self.critic)
        is_by_token = self._settings.aggregation == "token-mean"
        denominator = totals.n_tokens if is_by_token else totals.n_sequences
        return _OptimizerStep(norm, denominator, lr_share, value_loss, critic_norm)

    def _critic_step(self, batch: Batch, part: Minibatch, critic: Critic) -> tuple[float, float]:
        """Gradient and step of the critic on the same minibatch; returns (value loss, gradient norm)."""
        (n_tokens,) = self._ranks.sum([float(part.n_signal_tokens)])
        with self._journal.span("critic"):
            critic.optimizer.zero_grad()
            value = 0.0
            for indices in self._passes.micro_batches(batch, part.members, self.version, model=critic.model):
                if not indices:
                    critic.model.idle_pass()
                    continue
                loss = critic.loss(batch, indices, n_tokens)
                loss.backward()  # type: ignore[no-untyped-call]
                value += float(loss.detach())
                self._beat()
            (total,) = self._ranks.sum([value])
            norm = critic.grad_norm()
            if not (math.isfinite(total) and math.isfinite(norm)):
                self._raise_nonfinite(batch, loss=total, norm=norm)
            critic.step(self.version, norm)
        return total, norm

    def _totals(self, part: Minibatch) -> Totals | None:
        """Denominators of a minibatch over all ranks, as `loss_denominator` says; None if no rank has a token."""
        counts = [part.n_tokens, part.n_signal_tokens, part.n_sequences, len(part.members)]
        n_tokens, n_signal_tokens, n_sequences, n_members = self._ranks.sum([float(n) for n in counts])
        if not n_signal_tokens:
            return None
        wanted = self._settings.loss_denominator
        if wanted == "signal":
            return Totals(n_signal_tokens, n_members)
        return Totals(n_tokens if wanted == "all" else float(wanted), n_sequences)

    def _m2_bound(self, batch: Batch, part: Minibatch) -> float | None:
        """Largest (prox - sampler)^2 that M2PO trains in this minibatch; None without M2PO."""
        if self._settings.m2_threshold is None:
            return None
        squared = [
            (batch.streams["prox"][i] - batch.items[i].behav_K[batch.items[i].trained_K]).square() for i in part.members
        ] or [torch.zeros(0)]
        return second_moment_threshold(torch.cat(squared), self._settings.m2_threshold, self._ranks.sum)

    def _backward(
        self,
        batch: Batch,
        indices: list[int],
        totals: Totals,
        metrics: StepMetrics,
        *,
        m2_bound: float | None,
        weights: list[Tensor],
    ) -> float:
        """Accumulate the gradient of one micro-batch, and append the weights of its trajectories, where the algorithm
        has such; returns its part of the loss of the minibatch.
        """
        if not indices:
            if self._teacher is not None:
                with torch.no_grad():
                    self._teacher.idle_pass()
            self.policy.idle_pass()
            return 0.0
        read = pieces(batch, indices)
        logprobs_N, entropy_N, apart_N = self.policy.read(
            read, entropy=True, entropy_grad=self._settings.entropy_coef > 0, teacher=self._taught(read)
        )
        part = replace(self._micro_batch(batch, indices, logprobs_N.device), apart_N=apart_N)
        done = micro_batch_loss(self.algorithm, part, logprobs_N, entropy_N, totals, m2_bound=m2_bound)
        done.loss.backward()  # type: ignore[no-untyped-call]
        if "prox" in part.streams or not self._n_applied:  # later minibatches also differ by this update's steps
            metrics.add(mismatch(done.importance_N, done.log_ratio))
        metrics.add_divergences(logprobs_N.detach(), part.streams, apart_N)
        sums = metrics.sums
        if entropy_N is not None:
            metrics.add_entropy([batch.items[i] for i in indices], entropy_N.detach())
        sums.clipped += done.n_clipped
        sums.loss += done.value * totals.n_tokens
        if done.weights_M is not None:
            weights.append(done.weights_M.cpu())
        for name, value in done.statistics.items():
            metrics.user[name] += value
        return float(done.loss.detach())

    @property
    def _teacher(self) -> FrozenModel | RemoteTeacher | None:
        """The teacher of a loss over its vocabulary."""
        return None if self._settings.distill_beta is None else self.frozen.teacher

    def _taught(self, read: Sequence[SequencePiece]) -> Teacher | GivenTeacher | None:
        beta, teacher = self._settings.distill_beta, self.frozen.teacher
        if beta is None or teacher is None:
            return None
        return teacher.teach(read, beta=beta, top_k=self._settings.distill_top_k)

    def _micro_batch(self, batch: Batch, indices: list[int], device: torch.device) -> MicroBatchTokens:
        items = [batch.items[i] for i in indices]
        is_trained = torch.cat([item.trained_K for item in items])
        lengths = torch.tensor([item.n_trained for item in items])
        is_by_trajectory = self._settings.episode_weights == "trajectory"
        return MicroBatchTokens(
            behav_N=torch.cat([item.behav_K for item in items])[is_trained].to(device),
            advantages_N=torch.cat([batch.advantages_of(i) for i in indices]).to(device),
            lags_N=torch.cat([item.lags_K for item in items])[is_trained].to(device),
            sequences_N=sequences_of(lengths).to(device),
            lengths_M=lengths.to(device),
            streams=_joined(batch, indices, device),
            weights_N=torch.cat([item.weights() for item in items]).to(device) if is_by_trajectory else None,
        )

    def _compute_prox(self, batch: Batch) -> None:
        members = [i for part in self._minibatches(batch) for i in part.members]
        batch.streams["prox"] = self._passes.logprobs(self.policy, batch, members, self.version)

    def _beat(self) -> None:
        self._context.heartbeat.progress += 1
        self._context.tick()

    def _raise_nonfinite(self, batch: Batch, *, loss: float, norm: float) -> NoReturn:
        sentence = f"loss and gradient must be finite: loss {loss}, gradient norm {norm} at version {self.version}"
        folder = self._context.folder / "nonfinite" / f"step-{batch.step:06d}" / f"rank-{self._ranks.index}"
        try:
            save_batch(folder, batch, reason=sentence)
            evidence = f"the batch is in {folder}"
        except (OSError, SafetensorError) as error:  # a full disk must not hide the first error
            evidence = f"the batch could not be saved ({error})"
        applied = (
            f"{self._n_applied} of {self._settings.ppo_n_minibatches * self._settings.ppo_epochs} minibatches were "
            "applied before it, so these "
            "weights are neither pushed nor kept"
            if self._n_applied
            else "nothing was applied"
        )
        raise NonFinite(f"{sentence}; {applied}; {evidence}")

    def _warn(self, sentence: str) -> None:
        if self._ranks.index == 0:
            logger.warning(sentence)
            self._journal.write(Event.NOTE, text=sentence)


def _moments(weights_M: Tensor) -> list[float]:
    """[sum, sum of the squares, number]."""
    return [float(weights_M.sum()), float(weights_M.square().sum()), float(len(weights_M))]


def _joined(batch: Batch, indices: Sequence[int], device: torch.device) -> Streams:
    """(N,) the streams that all of these items have."""
    return Streams(
        {
            name: torch.cat([stream[i] for i in indices]).to(device)
            for name, stream in batch.streams.items()
            if all(i in stream for i in indices)
        }
    )
