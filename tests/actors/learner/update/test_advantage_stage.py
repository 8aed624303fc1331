"""The advantages of a batch: rewards as they are shaped, baselines, normalisation, KL divergence and distillation."""

from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.algorithms.advantages import shape_rewards
from actors.learner.batching import build, minibatches
from actors.learner.model.critic import fill_returns
from actors.learner.model.frozen_model import FrozenModels
from actors.learner.update.advantage_stage import longest_turn, repeated_share, trajectories_of
from actors.workflows.protocol import at_turn_ends
from areal_bus.config.learner import ActorConfig
from areal_bus.config.validation import check
from areal_bus.messages import ShardItem
from areal_bus.sample_fields import TOKEN_REWARD, packed
from tests.support.learner_setup import (
    PLAIN,
    frozen_model,
    gradients,
    prepared,
    random_shard,
    settings,
    shard_item,
    tiny_actor,
    update,
    watch_gradients,
)

CLOCK = 3
PAPER = {"advantage": "none", "reward_bias": -0.5, "reward_scaling": 10.0, "normalize_batch": True}


def test_truncated_samples_are_trained_masked_or_worth_nothing(tmp_path: Path) -> None:
    shard = [replace(item, finish="length") if item.sample == 0 else item for item in random_shard(5)]
    batches = {}
    for way in ("train", "mask", "zero"):
        actor = tiny_actor(tmp_path / way, settings(actor={"advantage": "dr_grpo", "truncated_samples": way}))
        batches[way] = prepared(actor, shard)
    is_cut = torch.tensor([item.finish == "length" for item in batches["train"].items])
    for way, batch in batches.items():
        assert batch.computed[is_cut].any() == (way != "mask")
        assert batch.computed[~is_cut].all()
    advantages = {way: batch.advantages for way, batch in batches.items()}
    assert advantages["train"] is not None
    assert torch.equal(advantages["train"], advantages["mask"]), "their rewards stay in the baseline"  # type: ignore[arg-type]
    assert (advantages["zero"] != advantages["train"]).any()  # type: ignore[union-attr]
    parts = {way: minibatches(batch, 1, first=0)[0] for way, batch in batches.items()}
    whole, rest = batches["train"].items, [item for item in batches["train"].items if item.finish != "length"]
    for way, counted in (("train", whole), ("zero", whole), ("mask", rest)):  # by token and by sequence
        found = (parts[way].n_tokens, parts[way].n_sequences)
        assert found == (sum(item.n_trained for item in counted), sum(item.n_trained > 0 for item in counted)), way


def test_answers_that_repeat_themselves_are_masked_and_counted_by_the_settings_of_their_source(tmp_path: Path) -> None:
    endless, cycle = [5] * 60, [2, 3, 4, 5, 6, 7, 8, 9, 10] * 6
    plain = [2 + (i * i + i // 7) % 20 for i in range(60)]
    assert [round(repeated_share(torch.tensor(one)), 2) for one in (endless, cycle, plain, endless[:15])] == [
        0.98, 0.81, 0.0, 0.0
    ]  # fmt: skip
    shard = [
        replace(shard_item(group=group, sample=s, reward=s, sampled=ids, n_groups=3), source=source, finish=finish)
        for group, source in enumerate(("strict", "lax", "off"))
        for s, (ids, finish) in enumerate([(endless, "stop"), (cycle, "stop"), (plain, "stop"), (plain, "length")])
    ]
    own = {"strict": {"truncated_samples": "mask"}, "lax": {"mask_repetition": 0.9}, "off": {"mask_repetition": 1.0}}
    data = {"source": [{"name": name, "task": "sums", "weight": 1} | keys for name, keys in own.items()]}
    actor = tiny_actor(tmp_path, settings(actor={"advantage": "dr_grpo", "mask_repetition": 0.5}, data=data))
    batch = prepared(actor, shard)
    assert batch.left_out is not None
    assert batch.left_out.tolist() == [True, True, False, True] + [True, False, False, False] + [False] * 4
    assert batch.advantages is not None
    assert batch.advantages[:4].tolist() == [-1.5, -0.5, 0.5, 1.5], "their rewards stay in the baseline"
    stats = actor.ppo_update(batch)
    n = [len(item.places_K) for item in batch.items]
    kept = sum(x for x, is_out in zip(n, batch.left_out.tolist(), strict=True) if not is_out)
    assert (stats["repeated_share"], stats["n_tokens_trained"], stats["loss_denominator"]) == (3 / 12, kept, kept)
    assert stats["n_tokens_skipped"] == sum(n) - kept
    assert "repeated_share" not in update(tiny_actor(tmp_path / "off", settings()), random_shard(5))


@pytest.mark.parametrize(("turns", "longest"), [([6], 6), ([3, 5, 4], 5), ([2, 2], 2), ([], 0)])
def test_penalties_read_the_longest_turn_and_the_limit_that_a_prompt_was_admitted_with(
    turns: list[int], longest: int
) -> None:
    places, at = [], 0
    for n in turns:
        places += range(at + 4, at + 4 + n)  # a turn follows 4 given tokens
        at += 4 + n
    assert longest_turn(torch.tensor(places, dtype=torch.int64)) == longest
    n, longest_M = torch.tensor([sum(turns), 10]), torch.tensor([longest, 10])
    actor, limits = ActorConfig(length_penalty=1.0, overlong_tokens=2), torch.tensor([6, 11])  # of two stages
    shaped = shape_rewards(
        torch.ones(2), n, torch.zeros(2, dtype=torch.bool), actor, max_new_tokens=limits, longest_M=longest_M
    )
    overlong = [min(max(longest - 4, 0) / 2, 1), 0.5]
    assert shaped.tolist() == pytest.approx([1 - overlong[0] - sum(turns) / 6, 1 - overlong[1] - 10 / 11])


def test_rewards_are_clipped_and_long_answers_lose_some(tmp_path: Path) -> None:
    actor = {"advantage": "none", "reward_clip": 0.5, "overlong_tokens": 4, "length_penalty": 0.1}
    config = settings(actor=actor, gconfig={"n_samples": 4, "max_new_tokens": 12})
    shard = random_shard(6)
    batch = prepared(tiny_actor(tmp_path, config), shard)
    advantages = batch.advantages
    expected = [
        min(item.reward, 0.5) - min(max((item.n_sampled - 8) / 4, 0), 1) - 0.1 * item.n_sampled / 12
        for item in batch.items
    ]
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("advantage", ["reinforce", "distill", "gae"])
def test_a_group_of_one_trains_where_the_baseline_is_of_no_group(tmp_path: Path, advantage: str) -> None:
    teacher = {"teacher": {"path": "t"}} if advantage == "distill" else {}
    config = settings(actor={"advantage": advantage}, gconfig={"n_samples": 1}, data=PLAIN, **teacher)
    check(config)
    shard = [item for item in random_shard(7, n_groups=6) if item.sample == 0]
    batch = prepared(tiny_actor(tmp_path, config), shard)
    assert batch.computed.all()
    if advantage == "reinforce":
        weights = torch.tensor([float(item.n_trained) for item in batch.items])
        rewards = torch.tensor([item.reward for item in batch.items])
        assert torch.allclose(batch.advantages, rewards - (weights * rewards).sum() / weights.sum(), atol=1e-6)


def test_a_masked_trajectory_stays_in_its_groups_baseline(tmp_path: Path) -> None:
    shard = [
        shard_item(sample=s, reward=r, clock=5, spans=[[0 if s == 3 else 5, 4]]) for s, r in enumerate([0, 0, 0, 4])
    ]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "rloo"})), shard)
    assert batch.advantages.tolist() == pytest.approx([-4 / 3, -4 / 3, -4 / 3, 4])


@pytest.mark.parametrize("over", ["all", "signal"])
def test_the_papers_advantages_are_normalised_over_the_batch_without_a_groups_baseline(
    tmp_path: Path, over: str
) -> None:
    rewards = [1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    shard = [shard_item(group=i // 4, sample=i % 4, reward=reward, n_groups=2) for i, reward in enumerate(rewards)]
    actor = tiny_actor(tmp_path, settings(actor=PAPER | {"normalize_batch": "all" if over == "all" else True}))
    batch = prepared(actor, shard)
    counted = torch.tensor([10 * r - 5 for r in rewards if over == "all"] or [5.0, -5.0, -5.0, -5.0])
    tokens = counted.repeat_interleave(4)
    expected = (counted - tokens.mean()) / (tokens.std() + 1e-6)
    assert torch.allclose(batch.advantages[-len(counted) :], expected, atol=1e-5)
    stats = actor.ppo_update(batch)
    assert stats["reward"] == 5 / 8, "the journal keeps the reward as it was given"
    assert stats["zero_advantage_share"] == (0.0 if over == "all" else 0.5)
    assert stats["n_tokens_trained"] == (32 if over == "all" else 16)


@pytest.mark.parametrize("actor", [PAPER | {"normalize_batch": "all"}, {"advantage": "reinforce"}, PAPER])
def test_sources_are_normalised_with_those_that_they_name(tmp_path: Path, actor: dict[str, Any]) -> None:
    """Rewards of another scale change nothing for the others; each part is as if it were alone."""
    shard = [replace(item, source="abc"[item.group % 3]) for item in random_shard(7, n_groups=6)]
    shard = [replace(item, reward=100 * item.reward) if item.source == "c" else item for item in shard]
    own = {"a": "small", "b": "small", "c": "large"}
    data = {"source": [{"name": one, "task": "sums", "weight": 1, "normalize_with": own[one]} for one in own]}
    apart = prepared(tiny_actor(tmp_path, settings(actor=actor, data=data)), shard).advantages
    for name in ("small", "large"):
        part = [item for item in shard if own[item.source] == name]
        alone = prepared(tiny_actor(tmp_path, settings(actor=actor)), part).advantages
        assert torch.allclose(apart[[own[item.source] == name for item in shard]], alone, atol=1e-5)
    together = prepared(tiny_actor(tmp_path, settings(actor=actor)), shard).advantages
    assert not torch.allclose(apart, together, atol=0.1)


def test_without_any_baseline_only_a_reward_of_nothing_trains_nothing(tmp_path: Path) -> None:
    shard = [shard_item(group=i // 4, sample=i % 4, reward=float(i < 4), n_groups=2) for i in range(8)]
    stats = update(tiny_actor(tmp_path, settings(actor={"advantage": "none"})), shard)
    assert (stats["n_tokens_trained"], stats["zero_advantage_share"]) == (16, 0.5)


def test_the_reward_loses_the_sum_of_the_KL_over_the_trained_tokens(tmp_path: Path) -> None:
    shard = random_shard(5, clock=CLOCK, old=True)
    actor = {"kl_ctl": 0.2, "kl_in": "reward", "advantage": "none", "reward_scaling": 2.0}
    batch = prepared(tiny_actor(tmp_path, settings(actor=actor)), shard)
    for i, item in enumerate(batch.items):
        assert len(batch.streams["reference"][i]) == item.n_trained < item.n_sampled
        gap = batch.streams["prox"][i].double() - batch.streams["reference"][i].double()
        wanted = 2.0 * item.reward - 0.2 * float(gap.sum())  # k1
        assert float(batch.advantages[i]) == pytest.approx(wanted, abs=1e-5)


def test_distillation_is_the_log_ratio_to_the_teacher_with_or_without_the_reward(tmp_path: Path) -> None:
    shard = random_shard(9, clock=CLOCK, old=True)
    ways: list[dict[str, Any]] = [{"advantage": "rloo"}, {"advantage": "distill"}]
    ways.append({"advantage": "rloo", "distill_coef": 0.25})
    plain, alone, both = (
        prepared(tiny_actor(tmp_path / str(i), settings(actor=way)), shard) for i, way in enumerate(ways)
    )
    for i in range(len(shard)):
        ratio = alone.streams["teacher"][i] - alone.streams["prox"][i]
        assert float(ratio.abs().max()) > 0.01
        assert torch.equal(alone.advantages_of(i), ratio)
        assert torch.allclose(both.advantages_of(i), plain.advantages_of(i) + 0.25 * ratio, atol=1e-6)


def turns_item(sample: int, reward: float, turn_rewards: list[float], **others: Any) -> ShardItem:
    """Three turns of two tokens, after two given ones, then after one."""
    field = array("f", at_turn_ends([2, 2, 2], turn_rewards)).tobytes()
    item = shard_item(
        sample=sample, reward=reward, prompt=[2] * 4, sampled=[3] * 6, segments=[[2, 2], [1, 2], [1, 2]], **others
    )
    return replace(item, fields=packed({TOKEN_REWARD: field}))


def test_a_turn_has_the_normalised_rewards_of_itself_and_of_later_turns(tmp_path: Path) -> None:
    """By hand: the steps of the group are 1, 0, 1 and 0, 0, 0; mean 1/3, deviation by n - 1 sqrt(4 / 15)."""
    shard = [turns_item(0, 1.0, [1.0, 0.0, 0.0]), turns_item(1, 0.0, [0.0, 0.0, 0.0])]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "grpo_process", "std_eps": 1e-12})), shard)
    high, low = (2 / 3) / (4 / 15) ** 0.5, (-1 / 3) / (4 / 15) ** 0.5
    sums = [[high + low + high, low + high, high], [3 * low, 2 * low, low]]
    for i, by_turn in enumerate(sums):
        expected = [value for value in by_turn for _ in range(2)]
        assert batch.advantages_of(i).tolist() == pytest.approx(expected, abs=1e-6)
    assert batch.computed.tolist() == [True, True]


def test_turns_without_a_difference_have_no_signal(tmp_path: Path) -> None:
    shard = [turns_item(sample, -0.1, [0.3, 0.3, 0.4]) for sample in range(2)]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "grpo_process"})), shard)
    assert batch.signal.tolist() == batch.computed.tolist() == [False, False]
    assert not batch.advantages_of(0).any()


@pytest.mark.parametrize("normalize", [False, True])
def test_samples_of_one_turn_without_rewards_of_turns_have_the_advantages_of_grpo(
    tmp_path: Path, normalize: bool
) -> None:
    batches = {}
    for kind in ("grpo", "grpo_process"):
        # all tokens enter the normalisation by token, so those of groups without signal must in the other, too
        actor = {"advantage": kind, "normalize_batch": normalize and "all"}
        batches[kind] = prepared(tiny_actor(tmp_path / kind, settings(actor=actor)), random_shard(5))
    for i in range(len(batches["grpo"].items)):
        found = [batches[kind].advantages_of(i).tolist() for kind in ("grpo", "grpo_process")]
        assert found[0] == pytest.approx(found[1], abs=1e-6)


def test_a_masked_turn_counts_in_the_mean_and_is_not_trained(tmp_path: Path) -> None:
    """Two turns of a sample are too old. By hand: the steps are 0, 1, 0 and 0, 0, 0; deviation 1 / sqrt(6)."""
    old = {"clock": 4, "spans": [[0, 4], [4, 2]]}
    shard = [turns_item(0, 0.0, [0.0, 1.0, 0.0], **old), turns_item(1, 0.0, [0.0, 0.0, 0.0], clock=4, spans=[[4, 6]])]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "grpo_process", "std_eps": 1e-12})), shard)
    assert batch.advantages_of(0).tolist() == pytest.approx([-1 / 6 * 6**0.5] * 2, abs=1e-6)
    assert batch.advantages_of(1).tolist() == pytest.approx([-n / 6 * 6**0.5 for n in (3, 3, 2, 2, 1, 1)], abs=1e-6)


def test_each_trajectory_of_an_episode_has_its_own_steps_and_the_reward_of_the_episode(tmp_path: Path) -> None:
    """Turns 1 and 3 are one trajectory, turn 2 another. By hand: its steps are 0.5, 1.25 and 1; that of the second
    sample is 0; the third has no sampled token.
    """
    episode = replace(turns_item(0, 1.0, [0.5, 0.0, 0.25]), trajectories=[0, 1, 0])
    other = shard_item(sample=1, reward=0.0)
    empty = shard_item(sample=2, reward=1.0, sampled=[], logps=[], spans=[], segments=[[3, 0]])
    config = settings(actor={"advantage": "grpo_process", "std_eps": 1e-12})
    batch = prepared(tiny_actor(tmp_path, config), [episode, other, empty])
    steps = torch.tensor([0.5, 1.25, 1.0, 0.0])
    first, third, second, of_other = ((steps - steps.mean()) / steps.std()).tolist()
    expected = [first + third, first + third, third, third, second, second]  # trajectories are adjacent
    assert batch.advantages_of(0).tolist() == pytest.approx(expected, abs=1e-6)
    assert batch.advantages_of(1).tolist() == pytest.approx([of_other] * 4, abs=1e-6)
    assert batch.advantages_of(2).tolist() == []
    assert batch.computed.tolist() == [True, True, False]


def game(sample: int, roles: str, *rewards: float, group: int = 0, **changes: Any) -> ShardItem:
    """An episode in which the roles speak one after the other, two tokens each."""
    n = len(rewards)
    item = shard_item(
        group=group, sample=sample, prompt=[5], sampled=[6, 7, *[5, 6, 7] * (n - 1)], segments=[[1, 2]] * n,
        logps=[-1.0] * (2 * n), spans=[[CLOCK, 2 * n]], clock=CLOCK,
    )  # fmt: skip
    return replace(item, trajectories=list(range(n)) if n > 1 else [], roles=roles, rewards=list(rewards), **changes)


@pytest.mark.parametrize("estimator", ["rloo", "grpo", "dr_grpo", "grpo_process", "reinforce"])
def test_advantages_compare_trajectories_of_one_role_only(tmp_path: Path, estimator: str) -> None:
    """As if each role of a group were a group of its own."""
    rewards = [(1.0, -1.0), (-1.0, 1.0), (-1.0, 1.0), (0.5, 4.0)]
    games = [game(sample, "black white", *both) for sample, both in enumerate(rewards)]
    alone = [game(s, "", both[role], group=role) for role in (0, 1) for s, both in enumerate(rewards)]
    alone = [replace(item, rewards=[], reward=item.rewards[0], n_groups=2) for item in alone]
    config = settings(actor={"advantage": estimator})
    together, apart = (prepared(tiny_actor(tmp_path / str(len(shard)), config), shard) for shard in (games, alone))
    for sample in range(4):
        expected = torch.cat([apart.advantages_of(sample), apart.advantages_of(4 + sample)])
        assert torch.allclose(together.advantages_of(sample), expected), sample
    assert together.advantages_of(0)[0] * together.advantages_of(0)[-1] < 0
    assert together.signal.all()


def test_a_role_that_one_sample_has_alone_is_not_trained(tmp_path: Path) -> None:
    games = [game(0, "first", 1.0), game(1, "first second", -1.0, 1.0)]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "rloo"}, gconfig={"n_samples": 2})), games)
    assert batch.advantages_of(0).tolist() == [2.0, 2.0]
    assert batch.advantages_of(1).tolist() == [-2.0, -2.0, 0.0, 0.0]


def test_streams_of_a_role_are_means_over_its_own_tokens(tmp_path: Path) -> None:
    field = packed({"x": array("f", [1.0, 3.0, 5.0, 9.0]).tobytes()})
    games = [game(sample, "a b", 1.0, 0.0, fields=field) for sample in range(4)]
    batch = prepared(tiny_actor(tmp_path, settings(actor={"advantage": "rloo"})), games)
    seen = trajectories_of(batch, settings())
    assert seen.streams["x"].tolist() == [2.0, 7.0] * 4
    assert (seen.groups_M.tolist(), seen.lengths_M.tolist()) == ([0, 1] * 4, [2] * 8)
    assert not batch.signal.any()


def test_a_critics_returns_end_with_the_reward_of_each_role(tmp_path: Path) -> None:
    games = [game(sample, "a b", 1.0, -3.0) for sample in range(4)]
    batch = build(games, step=CLOCK, clock=CLOCK, n_groups=1, eta=1)
    config = ActorConfig(discount=1.0, gae_lambda=1.0)
    fill_returns(
        batch, [torch.tensor([1.0, -3.0], dtype=torch.float64)] * 4, {i: torch.zeros(4) for i in range(4)}, config
    )
    assert batch.streams["returns"][0].tolist() == [1.0, 1.0, -3.0, -3.0]


@pytest.mark.parametrize(
    "actor",
    [
        {"loss": "gspo", "kl_ctl": 0.5, "kl_estimator": "k2"},
        {"loss": "gspo", "kl_ctl": 0.5},
        {"loss": "gspo", "kl_ctl": 0.5, "kl_in": "reward", "kl_estimator": "k1"},
        {"advantage": "distill"},
    ],
)
def test_a_policy_that_is_the_reference_or_the_teacher_has_a_divergence_of_exactly_zero(
    tmp_path: Path, actor: dict[str, Any]
) -> None:
    """Its gradient is that without the term; by distillation alone exactly zero."""
    shard = random_shard(6, clock=CLOCK)
    one = tiny_actor(tmp_path / "one", settings(actor=actor | {"max_grad_norm": 1e9}))
    model = frozen_model(one.policy, seed=0)
    one.frozen = FrozenModels(model if "kl_ctl" in actor else None, None if "kl_ctl" in actor else model)
    found, stats = watch_gradients(one), update(one, shard)
    assert stats["kl_ref" if "kl_ctl" in actor else "kl_teacher"] == 0.0
    assert stats["n_tokens_skipped"] == 0
    if "kl_ctl" in actor:
        plain = tiny_actor(tmp_path / "plain", settings(actor={"loss": "gspo", "max_grad_norm": 1e9}))
        torch.testing.assert_close(found, gradients(plain, shard), atol=1e-7, rtol=1e-5)
    else:
        assert not any(bool(g.any()) for g in found)


@pytest.mark.parametrize("over", ["signal", "all"])
def test_the_normalisation_counts_groups_without_signal_or_not(tmp_path: Path, over: str) -> None:
    flat = [replace(item, reward=0.5) if item.group == 2 else item for item in random_shard(5)]
    config = settings(
        actor={**PAPER, "advantage": "rloo", "normalize_batch": "all" if over == "all" else True, "std_unbiased": False}
    )
    batch = prepared(tiny_actor(tmp_path, config), flat)
    tokens = torch.cat(
        [
            batch.advantages[i].expand(item.n_trained)
            for i, item in enumerate(batch.items)
            if over == "all" or item.group != 2
        ]
    )
    assert float(tokens.mean()) == pytest.approx(0.0, abs=1e-5)
    assert float(tokens.std(unbiased=False)) == pytest.approx(1.0, abs=1e-4)
    of_flat = batch.advantages[[item.group == 2 for item in batch.items]]
    assert bool((of_flat != 0).all()) == (over == "all")
    assert batch.signal.all() == (over == "all")
