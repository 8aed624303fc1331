"""Finds the parts that the settings name, and tries the user's own on a small example before the run begins."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from actors.learner.algorithms.advantages import ESTIMATORS, Estimator
from actors.learner.algorithms.corrections import CORRECTIONS
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from actors.learner.algorithms.parts import (
    Aggregation,
    Correction,
    Loss,
    Make,
    Statistics,
    Streams,
    Tokens,
    Totals,
    Trajectories,
    sequences_of,
)
from actors.runtime.user_code import cause, load_function
from areal_bus.config.algorithms import correction_of, is_users, uses_reference, uses_teacher
from areal_bus.config.learner import ActorConfig
from areal_bus.errors import ConfigError
from areal_bus.sample_fields import broken_rule

MODELS = ("prox", "reference", "teacher")  # streams that are log-probs of a model
BUILTIN_STATISTICS = ("clip_share",)  # have a name of their own in the journal


@dataclass(frozen=True, slots=True)
class Algorithm:
    """The four parts of an algorithm, found and tried."""

    settings: ActorConfig
    estimator: Estimator
    loss: Loss
    correction: Correction
    aggregation: Aggregation
    statistics: tuple[str, ...] = ()  # names that the user's loss reports
    needed: tuple[str, ...] = ()  # streams that the user's parts read, see `needs`
    makers: Mapping[str, Make] = field(default_factory=dict)  # of further streams, by name

    @property
    def is_fused(self) -> bool:
        """Whether `fused.py` computes this algorithm's sum and gradient."""
        settings = self.settings
        return (
            settings.loss == "ppo"
            and settings.prox_logp_method == "recompute"
            and settings.c_clip is None
            and settings.aggregation == "token-mean"
            and settings.episode_weights == "token"
            and correction_of(settings) in ("decoupled", "none")
            and settings.correction_action != "mask"
            and settings.m2_threshold is None
            and not settings.entropy_coef
            and not (settings.kl_ctl and settings.kl_in == "loss")
            and settings.distill_beta is None
        )

    @property
    def needs_teacher_tokens(self) -> bool:
        """Whether the teacher's log-probs of the sampled tokens are read: for advantages, or by users' parts."""
        settings = self.settings
        return uses_teacher(settings) and (settings.distill_beta is None or "teacher" in self.needed)

    @property
    def needs_prox_first(self) -> bool:
        """Whether advantages need the policy's log-probs: for the reward's KL, distillation or users' streams."""
        settings = self.settings
        is_in_reward = settings.kl_ctl > 0 and settings.kl_in == "reward"
        is_distilled = uses_teacher(settings) and settings.distill_beta is None
        return is_distilled or is_in_reward or "prox" in self.needed

    @property
    def needs_prox_pass(self) -> bool:
        """Whether proximal log-probs are computed before the update: if its first forward pass cannot give them."""
        settings = self.settings
        if self.needs_prox_first:
            return True
        if not settings.recompute_logprobs or settings.prox_logp_method == "loglinear":
            return False
        return settings.ppo_n_minibatches * settings.ppo_epochs > 1 or settings.m2_threshold is not None


def find_algorithm(settings: ActorConfig) -> Algorithm:
    """Raises ConfigError for a part that does not import, fails on the example or returns a wrong shape."""
    correction = correction_of(settings)
    advantage = ESTIMATORS.get(settings.advantage)
    algorithm = Algorithm(
        settings,
        advantage or Estimator(load_function("actor.advantage", settings.advantage), has_group_baseline=False),
        find("actor.loss", settings.loss, LOSSES),
        find("actor.correction", correction, CORRECTIONS),
        find("actor.aggregation", settings.aggregation, AGGREGATIONS),
    )
    algorithm = with_streams(algorithm)
    return with_checks(replace(algorithm, statistics=try_parts(algorithm)))


def with_streams(algorithm: Algorithm) -> Algorithm:
    """With what its parts declare by `needs`. Raises ConfigError for a stream that nothing can make."""
    parts = (algorithm.estimator.estimate, algorithm.loss, algorithm.correction)
    needed = tuple(dict.fromkeys(name for part in parts for name in getattr(part, "needed_streams", ())))
    makers = {name: make for part in parts for name, make in getattr(part, "made_streams", {}).items()}
    settings = algorithm.settings
    absent = {"reference": not uses_reference(settings), "teacher": not uses_teacher(settings)}
    for name in needed:
        if absent.get(name):
            remedy = "actor.kl_ctl" if name == "reference" else "teacher.path and actor.distill_coef"
            raise ConfigError(
                f"missing stream {name!r}: a part of [actor] needs it, and no such model is loaded: set {remedy}"
            )
    if broken := broken_rule([name for name in needed if name not in MODELS] + list(makers)):
        raise ConfigError(f"wrong stream in @needs of a part of [actor]: {broken}")
    return replace(algorithm, needed=needed, makers=makers)


def find(key: str, name: str, known: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    return known[name] if name in known else load_function(key, name)


def try_parts(algorithm: Algorithm) -> tuple[str, ...]:
    """Call the user's parts on an example of two trajectories; returns the names of the loss's statistics."""
    settings = algorithm.settings
    names: tuple[str, ...] = ()
    tokens, lengths = example(algorithm), torch.tensor([2, 3])
    if is_users(settings.advantage):
        rewards = torch.tensor([0.0, 1.0], dtype=torch.float64)
        means = {name: tokens.sequence_mean(values) for name, values in tokens.streams.items()}
        trajectories = Trajectories(rewards, torch.zeros(2, dtype=torch.int64), lengths, Streams(means))
        checked("advantage", settings.advantage, lambda: algorithm.estimator.estimate(trajectories, settings), 2)
    if is_users(correction_of(settings)):
        checked("correction", settings.correction, lambda: algorithm.correction(tokens, settings), 5)
    if is_users(settings.aggregation):
        totals = Totals(n_tokens=5.0, n_sequences=2.0)
        checked("aggregation", settings.aggregation, lambda: algorithm.aggregation(lengths, totals, settings), 2)
    if is_users(settings.loss):
        losses, statistics = checked_loss(algorithm, tokens)
        if not losses.requires_grad:
            raise ConfigError(
                f'actor.loss = "{settings.loss}" must depend on tokens.logprobs_N: its result has no gradient'
            )
        names = tuple(sorted(statistics))
    return names


def example(algorithm: Algorithm) -> Tokens:
    """Five trained tokens of two trajectories with different log-probs by policy; all fields are 0.5."""
    logprobs = torch.tensor([-1.0, -0.5, -2.0, -1.5, -0.7], requires_grad=True)
    tokens = Tokens(
        logprobs_N=logprobs,
        anchor_N=logprobs.detach() - 0.1,
        prox_N=logprobs.detach() - 0.1,
        behav_N=logprobs.detach() + 0.1,
        advantages_N=torch.tensor([1.0, 1.0, -1.0, -1.0, -1.0]),
        lags_N=torch.tensor([0, 1, 0, 1, 2]),
        sequences_N=sequences_of(torch.tensor([2, 3])),
        lengths_M=torch.tensor([2, 3]),
        entropy_N=torch.full((5,), 0.5),
    )
    half, ones = torch.full((5,), 0.5), torch.ones(5)
    tokens.streams.update({n: logprobs.detach() - 0.2 if n in MODELS else half for n in algorithm.needed})
    seen = Streams({"behav": tokens.behav_N, "lags": tokens.lags_N, "reward": ones, **tokens.streams})
    for name, make in algorithm.makers.items():  # as of one trajectory
        key = f"{algorithm.settings.loss}, stream {name}"
        tokens.streams[name] = checked("loss", key, partial(make, seen, algorithm.settings), 5)
    return tokens


def checked(key: str, name: str, call: Callable[[], Any], n: int) -> Tensor:
    """The result of a user's part on the example. Raises ConfigError unless it is `n` finite numbers."""
    try:
        result = call()
    except Exception as error:
        raise ConfigError(f'actor.{key} = "{name}" failed on the example of five tokens: {cause(error)}') from error
    refuse(key, name, result, n)
    return result  # type: ignore[no-any-return]


def check_shape(key: str, name: str, result: Any, n: int) -> None:
    """Raises ConfigError unless `result` is a tensor of `n` numbers."""
    if not isinstance(result, Tensor):
        raise ConfigError(f'actor.{key} = "{name}" must return a tensor: it returned a {type(result).__name__}')
    if result.shape != (n,):
        raise ConfigError(f'actor.{key} = "{name}" must return shape ({n},): it returned {tuple(result.shape)}')


def check_loss(name: str, n: int, losses_N: Any, statistics: Statistics, wanted: Sequence[str]) -> None:
    """Raises ConfigError unless a user's loss returns these shapes and the statistics of the example."""
    check_shape("loss", name, losses_N, n)
    if sorted(statistics) != list(wanted):
        raise ConfigError(
            f'actor.loss = "{name}" must return the same statistics each time: {list(wanted)} on the example, '
            f"{sorted(statistics)} on a batch"
        )
    for key, values in statistics.items():
        check_shape("loss", f"{name}, statistic {key}", values, n)


def with_checks(algorithm: Algorithm) -> Algorithm:
    """The same parts; those of the user raise ConfigError for a result of a wrong form on any batch.

    Numbers that are not finite are found with the gradient (`PPOActor.ppo_update`), and the batch is saved.
    """
    settings = algorithm.settings

    def estimate(trajectories: Trajectories, settings: ActorConfig) -> Tensor:
        advantages_M = algorithm.estimator.estimate(trajectories, settings)
        check_shape("advantage", settings.advantage, advantages_M, len(trajectories.rewards_M))
        return advantages_M

    def loss(tokens: Tokens, settings: ActorConfig) -> tuple[Tensor, Statistics]:
        losses_N, statistics = split(algorithm.loss(tokens, settings))
        check_loss(settings.loss, len(tokens.behav_N), losses_N, statistics, algorithm.statistics)
        return losses_N, statistics

    def correction(tokens: Tokens, settings: ActorConfig) -> Tensor:
        weight_N = algorithm.correction(tokens, settings)
        check_shape("correction", settings.correction, weight_N, len(tokens.behav_N))
        return weight_N

    def aggregation(lengths_M: Tensor, totals: Totals, settings: ActorConfig) -> Tensor:
        share_M = algorithm.aggregation(lengths_M, totals, settings)
        check_shape("aggregation", settings.aggregation, share_M, len(lengths_M))
        return share_M

    return replace(
        algorithm,
        estimator=replace(algorithm.estimator, estimate=estimate)
        if is_users(settings.advantage)
        else algorithm.estimator,
        loss=loss if is_users(settings.loss) else algorithm.loss,
        correction=correction if is_users(correction_of(settings)) else algorithm.correction,
        aggregation=aggregation if is_users(settings.aggregation) else algorithm.aggregation,
    )


def refuse(key: str, name: str, result: Any, n: int) -> None:
    """Raises ConfigError unless `result` is a tensor of `n` finite numbers."""
    check_shape(key, name, result, n)
    if not bool(torch.isfinite(result).all()):
        raise ConfigError(
            f'actor.{key} = "{name}" must return finite numbers: it returned {result.tolist()} on the example'
        )


def checked_loss(algorithm: Algorithm, tokens: Tokens) -> tuple[Tensor, Statistics]:
    """Losses and statistics of the user's loss on the example."""
    name = algorithm.settings.loss
    try:
        losses, statistics = split(algorithm.loss(tokens, algorithm.settings))
    except Exception as error:
        raise ConfigError(f'actor.loss = "{name}" failed on the example of five tokens: {cause(error)}') from error
    refuse("loss", name, losses, len(tokens.behav_N))
    for key, values in statistics.items():
        refuse("loss", f"{name}, statistic {key}", values, len(tokens.behav_N))
    return losses, statistics


def split(result: Tensor | tuple[Tensor, Statistics]) -> tuple[Tensor, Statistics]:
    """(losses_N, statistics) of either form that a loss may return."""
    return result if isinstance(result, tuple) else (result, {})
