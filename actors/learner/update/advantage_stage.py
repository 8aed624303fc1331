"""From the rewards of a batch to its advantages, and to the items whose tokens enter the loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actors.learner.algorithms.advantages import by_step, group_advantages, normalize, shape_rewards
from actors.learner.algorithms.losses import KL_ESTIMATORS
from actors.learner.algorithms.parts import Streams, Trajectories
from actors.learner.algorithms.registry import Algorithm
from actors.learner.batching import Batch, Item
from actors.learner.model.critic import fill_returns
from actors.runtime.stages import stages_of
from areal_bus.config.algorithms import kl_estimator_of, uses_teacher
from areal_bus.config.learner import ActorConfig
from areal_bus.config.sections import Config
from areal_bus.core.parts.stages import stage_at
from areal_bus.errors import ConfigError
from areal_bus.messages import Finish
from areal_bus.sample_fields import TAKEN, TOKEN_REWARD

GRAM = 8
Total = Callable[[list[float]], list[float]]  # sums over the learner ranks


def fill_advantages(
    batch: Batch, algorithm: Algorithm, config: Config, total: Total, values: Mapping[int, Tensor] | None = None
) -> None:
    """Set `advantages`, `signal` and `computed` of this rank's share, with a critic's `values` also by token.

    The log-probs that the reward's KL or distillation needs (proximal, frozen models) must be there.
    """
    settings, estimator = config.actor, algorithm.estimator
    fill_token_rewards(batch, settings)
    if values is not None or estimator.is_by_step:
        fill_by_token(batch, config, total, values)
        return
    is_masked = leave_out(batch, config)
    units = units_of(batch)
    advantages_U, signal_U = group_advantages(trajectories_of(batch, config), estimator, settings)
    if settings.normalize_batch or estimator.normalization:
        parts = (
            normalized(units, advantages_U, signal_U, ~is_masked, one, algorithm, total)
            for one in source_parts(batch, config)
        )
        advantages_U = torch.stack(list(parts)).sum(0)
    set_advantages(batch, units, advantages_U)
    has_signal_U = signal_U | (advantages_U != 0) if estimator.has_group_baseline else advantages_U != 0
    batch.signal = torch.bincount(units.items_U[has_signal_U], minlength=len(batch.items)) > 0
    if uses_teacher(settings):
        batch.signal = distill(batch, settings)
    batch.computed = needs_gradient(batch, batch.signal, settings) & ~is_masked


@dataclass(frozen=True, slots=True)
class Units:
    """What has one reward and one advantage: an item, or with roles each of its trajectories. U units, item by item."""

    items_U: Tensor  # int64: index of the item
    rewards_U: Tensor  # float64, before shaping
    groups_U: Tensor  # int64: number of the group, or of the role within a group
    places: list[Tensor]  # of the sampled tokens
    n_trained: list[int]
    has_roles: bool


def units_of(batch: Batch) -> Units:
    keys = [(item.group, role) for item in batch.items for role in item.roles or [""]]
    has_roles = any(item.roles for item in batch.items)
    numbers = {key: number if has_roles else key[0] for number, key in enumerate(sorted(set(keys)))}
    places = [part for item in batch.items for part in item.by_reward(item.places_K, item.places_K)]
    trained = [part for item in batch.items for part in item.by_reward(item.trained_places, item.trained_places)]
    return Units(
        items_U=torch.tensor([i for i, item in enumerate(batch.items) for _ in item.roles or [""]], dtype=torch.int64),
        rewards_U=torch.tensor(
            [reward for item in batch.items for reward in item.rewards or [item.reward]], dtype=torch.float64
        ),
        groups_U=torch.tensor([numbers[key] for key in keys], dtype=torch.int64),
        places=places,
        n_trained=list(map(len, trained)),
        has_roles=has_roles,
    )


def set_advantages(batch: Batch, units: Units, advantages_U: Tensor) -> None:
    """Each item's advantage; with roles their mean, and those of the trajectories by token."""
    n_M = torch.bincount(units.items_U, minlength=len(batch.items))
    sums_M = torch.zeros(len(batch.items)).index_add(0, units.items_U, advantages_U)
    batch.advantages = sums_M / n_M
    by_token = advantages_U.repeat_interleave(torch.tensor(units.n_trained, dtype=torch.int64))
    shares = torch.split(by_token, [item.n_trained for item in batch.items])
    batch.streams["token_advantages"].update((i, shares[i]) for i, item in enumerate(batch.items) if item.roles)


def make_streams(batch: Batch, algorithm: Algorithm) -> None:
    """The streams of the algorithm's own parts. Raises ConfigError for one that is missing or has a wrong form."""
    if not algorithm.needed and not algorithm.makers:
        return
    batch.check_has(algorithm.needed)
    for name, make in algorithm.makers.items():
        if any(name in item.fields for item in batch.items):
            raise ConfigError(f"the stream {name!r} is made twice: by the workflow, and by @needs of a part of [actor]")
        batch.add(
            name, {i: make(seen(batch, i), algorithm.settings) for i, one in enumerate(batch.items) if one.n_trained}
        )


def seen(batch: Batch, index: int) -> Streams:
    """What the maker of a stream sees of one item: (n_trained,) each."""
    item = batch.items[index]
    plain = {
        "behav": item.behav_K[item.trained_K],
        "lags": item.lags_K[item.trained_K],
        "reward": torch.full((item.n_trained,), item.reward),
    }
    return Streams(plain | {name: stream[index] for name, stream in batch.streams.items() if index in stream})


def fill_token_rewards(batch: Batch, settings: ActorConfig) -> None:
    """The KL from the reference as a reward of each trained token. Masked tokens have none (I2)."""
    if settings.kl_ctl and settings.kl_in == "reward":
        estimate = KL_ESTIMATORS[kl_estimator_of(settings)]
        prox, reference = batch.streams["prox"], batch.streams["reference"]
        batch.streams["token_rewards"] = {i: -settings.kl_ctl * estimate(prox[i], reference[i]) for i in prox}


def distill(batch: Batch, settings: ActorConfig) -> Tensor:
    """Add -(log pi - log pi_teacher) to the advantage of each trained token, unless the loss has a divergence over the
    vocabulary (actor.distill_beta). Returns the signal: items with a trained token.

    This is the sampled estimate of the gradient of KL(pi, pi_teacher), token by token ("On-Policy Distillation",
    Thinking Machines Lab 2025). Zero where the policy is the teacher.
    """
    weight = settings.distill_coef or 1.0  # advantage = "distill": the other advantage is 0
    if settings.distill_beta is None:
        teacher = batch.streams["teacher"]
        for i, prox in batch.streams["prox"].items():
            batch.streams["token_advantages"][i] = batch.advantages_of(i) + weight * (teacher[i] - prox)
    return torch.tensor([item.n_trained > 0 for item in batch.items], dtype=torch.bool)


def fill_by_token(batch: Batch, config: Config, total: Total, values: Mapping[int, Tensor] | None) -> None:
    """Advantages of each token: by a critic's values, where each item with a trained token has something to learn, or
    by steps.
    """
    settings, units = config.actor, units_of(batch)
    n_of = torch.bincount(units.items_U, minlength=len(batch.items)).tolist()
    rewards = torch.split(shaped_rewards(batch, units, config), n_of)
    if values is None:
        fill_steps(batch, rewards, settings)
    else:
        fill_returns(batch, rewards, values, settings)
    made = batch.streams["token_advantages"]
    is_masked = leave_out(batch, config)
    if settings.normalize_batch:
        for part in source_parts(batch, config):
            normalize_by_token(batch, [i for i in made if part[i]], ~is_masked, settings, total)
    batch.advantages = torch.tensor([float(one.mean()) for one in rewards])
    if uses_teacher(settings):
        distill(batch, settings)
    has_values = values is not None
    signal = [i in made and (has_values or bool(made[i].any())) for i in range(len(batch.items))]
    batch.signal = torch.tensor(signal, dtype=torch.bool)
    batch.computed = (batch.signal if has_values else needs_gradient(batch, batch.signal, settings)) & ~is_masked


def fill_steps(batch: Batch, rewards: Sequence[Tensor], settings: ActorConfig) -> None:
    """Token advantages of every item, by the steps of its group and role. Masked tokens count, and are not trained."""
    steps = [steps_of(item, reward) for item, reward in zip(batch.items, rewards, strict=True)]
    members: dict[tuple[int, str], list[tuple[int, int]]] = {}  # group and role -> item and number of its trajectory
    for i, item in enumerate(batch.items):
        for n in range(len(steps[i])):
            members.setdefault((item.group, item.roles[n] if item.roles else ""), []).append((i, n))
    made: dict[tuple[int, int], Tensor] = {}
    for own in members.values():
        rewards_and_ends = [steps[i][n] for i, n in own]
        by_own = by_step([r for r, _ in rewards_and_ends], [end for _, end in rewards_and_ends], settings)
        made |= zip(own, by_own, strict=True)
    for i, item in enumerate(batch.items):
        advantages_K = torch.cat([made[i, n] for n in range(len(steps[i]))])
        batch.streams["token_advantages"][i] = advantages_K[item.trained_K].float()


def steps_of(item: Item, rewards: Tensor) -> list[tuple[Tensor, Tensor]]:
    """(rewards_K float64, ends_K bool) of each trajectory: a step ends with a turn, and with a token that has a reward
    of its own. The reward (of the item, or one each) follows the last token of each of its trajectories.
    """
    rewards_K, counts = torch.zeros(item.n_sampled).double(), item.counts(item.places_K)
    rewards_K += item.fields.get(TOKEN_REWARD, 0.0)
    ends_K = rewards_K != 0
    ends_K[:-1] |= item.places_K.diff() != 1
    last = torch.tensor(counts).cumsum(0) - 1
    last = last[last >= 0]  # none for a trajectory without a sampled token
    ends_K[last] = True
    rewards_K[last] += rewards
    return list(zip(torch.split(rewards_K, counts), torch.split(ends_K, counts), strict=True))


def normalize_by_token(
    batch: Batch, members: list[int], counted_M: Tensor, settings: ActorConfig, total: Total
) -> None:
    """Normalise the token advantages of these items over the global batch (a collective); only counted items count."""
    lengths = [batch.items[i].n_trained for i in members]
    advantages_N = torch.cat([torch.zeros(0), *(batch.streams["token_advantages"][i] for i in members)])
    weights_N = counted_M[members].double().repeat_interleave(torch.tensor(lengths, dtype=torch.int64))
    is_normalized = torch.ones(len(advantages_N), dtype=torch.bool)
    advantages_N = normalize(
        advantages_N, weights_N, is_normalized, total, unbiased=settings.std_unbiased, eps=settings.std_eps
    )
    batch.streams["token_advantages"].update(zip(members, torch.split(advantages_N, lengths), strict=True))


def shaped_rewards(batch: Batch, units: Units, config: Config) -> Tensor:
    """(U,) float64, without the rewards by token."""
    stages = stages_of(config)
    most = torch.tensor([stage_at(stages, item.born, item.source).max_new_tokens for item in batch.items])
    turns_U = torch.tensor([longest_turn(places) for places in units.places], dtype=torch.int64)
    zeroed_U, most_U = cut_and(batch, config, "zero")[units.items_U], most[units.items_U]
    return shape_rewards(
        units.rewards_U, lengths_of(units), zeroed_U, config.actor, max_new_tokens=most_U, longest_M=turns_U
    )


def rewards_of(batch: Batch, config: Config) -> Tensor:
    """(U,) float64: rewards before shaping, 0 for the answers that are worth nothing because they were cut off."""
    units = units_of(batch)
    return torch.where(cut_and(batch, config, "zero")[units.items_U], 0.0, units.rewards_U)


def longest_turn(places_K: Tensor) -> int:
    """Sampled tokens of the longest turn: gconfig.max_new_tokens is the limit of one."""
    if not len(places_K):
        return 0
    ends = (places_K.diff() != 1).nonzero()[:, 0] + 1
    bounds = torch.cat([ends.new_zeros(1), ends, ends.new_tensor([len(places_K)])])
    return int(bounds.diff().max())


def lengths_of(units: Units) -> Tensor:
    return torch.tensor(list(map(len, units.places)), dtype=torch.int64)


def trajectories_of(batch: Batch, config: Config) -> Trajectories:
    """What an estimator sees: the units of the batch."""
    units = units_of(batch)
    shaped = shaped_rewards(batch, units, config)
    if batch.streams["token_rewards"]:  # an estimator of one number a trajectory takes their sum
        shaped += torch.stack([x.double().sum() for x in by_unit(batch, "token_rewards")])
    streams = {name: means(batch, name) for name in batch.streams if name not in TAKEN}
    return Trajectories(shaped, units.groups_U, lengths_of(units), Streams(streams), units.has_roles)


def by_unit(batch: Batch, name: str) -> list[Tensor]:
    """The numbers of each unit: a workflow's field of its sampled tokens, else the stream of its trained ones."""
    found: list[Tensor] = []
    for i, item in enumerate(batch.items):
        is_field = name in item.fields
        values = item.fields[name] if is_field else batch.streams[name].get(i, torch.zeros(item.n_trained))
        found += item.by_reward(values, item.places_K if is_field else item.trained_places)
    return found


def means(batch: Batch, name: str) -> Tensor:
    """(U,) float64: mean of a stream over trained tokens, of a workflow's field over sampled ones; 0 for none."""
    by_unit_U = [float(x.double().mean()) if len(x) else 0.0 for x in by_unit(batch, name)]
    return torch.tensor(by_unit_U, dtype=torch.float64)


def leave_out(batch: Batch, config: Config) -> Tensor:
    """(n_items,) bool: the masked answers, which are cut off or repeat themselves, by the settings of their source.
    Sets `left_out` and `repeated`.
    """
    own = {source.label: source.mask_repetition for source in config.data.source}
    if config.actor.mask_repetition or any(own.values()):
        most = [own.get(item.source) or config.actor.mask_repetition or 1.0 for item in batch.items]
        pairs = zip(batch.items, most, strict=True)
        found = [x < 1 and repeated_share(item.ids_T[item.places_K]) > x for item, x in pairs]
        batch.repeated = torch.tensor(found, dtype=torch.bool)
    masked = cut_and(batch, config, "mask")
    batch.left_out = masked if batch.repeated is None else masked | batch.repeated
    return batch.left_out


def cut_and(batch: Batch, config: Config, way: str) -> Tensor:
    """(n_items,) bool: cut off by the length limit, where `truncated_samples` of the source is `way`."""
    ways = {source.label: source.truncated_samples for source in config.data.source}
    own = ((item.finish == Finish.LENGTH, ways.get(item.source)) for item in batch.items)
    return torch.tensor(
        [is_cut and (one or config.actor.truncated_samples) == way for is_cut, one in own], dtype=torch.bool
    )


def repeated_share(ids_K: Tensor) -> float:
    """Share of the sequences of GRAM tokens that occurred before in the answer; 0 for an answer of less than two."""
    if len(ids_K) < 2 * GRAM:
        return 0.0
    grams = ids_K.unfold(0, GRAM, 1)
    return 1 - len(torch.unique(grams, dim=0)) / len(grams)


def needs_gradient(batch: Batch, signal: Tensor, settings: ActorConfig) -> Tensor:
    """(n_items,) bool: an item without advantage may still have a bonus term, or a ratio that is fitted to it."""
    if settings.loss == "oapl" or settings.distill_beta is not None:
        return torch.ones_like(signal)
    if settings.entropy_coef or (settings.kl_ctl and settings.kl_in == "loss"):
        return torch.ones_like(signal)
    return signal


def source_parts(batch: Batch, config: Config) -> list[Tensor]:
    """(n_items,) bool each: items whose advantages are normalised together, in the same order on every rank; all items
    without `normalize_with` of a [[data.source]].
    """
    names = {source.label: source.normalize_with for source in config.data.source}
    own = [names.get(item.source, "") for item in batch.items]
    return [torch.tensor([one == name for one in own], dtype=torch.bool) for name in sorted({"", *names.values()})]


def normalized(
    units: Units, advantages: Tensor, signal: Tensor, counted: Tensor, part: Tensor, algorithm: Algorithm, total: Total
) -> Tensor:
    """Normalise the units of the items of a `part` over the global batch, others get 0; items not `counted` get a value
    and enter no statistic. Groups without signal count only with `normalize_batch = "all"`, or where the batch is
    the only baseline.
    """
    settings, estimator = algorithm.settings, algorithm.estimator
    is_only_baseline = bool(estimator.normalization) and not estimator.has_group_baseline
    over_signal = settings.normalize_batch != "all" and not is_only_baseline
    n_trained, part_U = torch.tensor(units.n_trained, dtype=torch.float64), part[units.items_U]
    return normalize(
        advantages,
        n_trained * counted[units.items_U],
        signal & part_U if over_signal else part_U,
        total,
        unbiased=settings.std_unbiased,
        eps=settings.std_eps,
        divide=estimator.normalization != "mean",
    )
