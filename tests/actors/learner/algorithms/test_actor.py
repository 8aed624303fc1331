"""Algorithms within PPOActor: every shipped config, and the user's own parts."""

import itertools
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from actors.learner.algorithms.advantages import shape_rewards
from actors.learner.algorithms.corrections import CORRECTIONS
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from actors.learner.algorithms.registry import find_algorithm
from actors.learner.batching import build, minibatches
from actors.learner.update.advantage_stage import longest_turn
from areal_bus.config.learner import ActorConfig
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from areal_bus.messages import ShardItem
from tests.support.learner_setup import random_shard, settings, tiny_actor

PLAIN = {"task": "sums", "chat_template": False}
FILES = sorted(Path("configs/algorithms").glob("*.toml"))
RUN = Path("configs/tiny.toml")
CLOCK, ETA = 3, 1


def config_of(file: Path, **learner: Any) -> Config:
    """The shipped algorithm, on the small model of the tests."""
    actor = load([RUN, file], ["teacher.path=TEACHER"] if file.stem == "distill" else (), {}).actor.model_dump() | {
        "lr": 1e-3,
        "max_grad_norm": 1e9,
    }
    return settings(actor=actor, learner=learner, gconfig={"n_samples": 4, "max_new_tokens": 12})


def gradients(folder: Path, config: Config, shard: list[ShardItem]) -> list[Tensor]:
    """Of the first optimizer step of an update at version CLOCK, in which half of the tokens are too old."""
    actor = tiny_actor(folder, config)
    actor.version = CLOCK
    seen: list[list[Tensor]] = []
    actor.optimizer.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in actor.policy.parameters().values() if p.grad is not None])
    )
    batch = build(shard, step=CLOCK, clock=CLOCK, n_groups=shard[0].n_groups, eta=ETA)
    actor.ppo_update(actor.compute_advantages_and_returns(batch))
    return seen[0]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_how_a_minibatch_is_cut_changes_no_gradient(tmp_path: Path, file: Path) -> None:
    shard = random_shard(3, clock=CLOCK, old=True, n_groups=4)
    found = [
        gradients(tmp_path / str(budget), config_of(file, max_tokens_per_mb=budget), shard) for budget in (1, 60, 9999)
    ]
    assert any(float(g.abs().max()) > 1e-4 for g in found[0])
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def masked_log_probs_lowered(item: ShardItem) -> bytes:
    """The sampler's log-probs with those of the first span changed: it is by version 0, older than eta allows."""
    logps = torch.frombuffer(bytearray(item.logps), dtype=torch.float32)
    logps[: item.spans[0][1]] -= 7.0
    return logps.numpy().tobytes()


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_I2_a_masked_token_has_no_influence_on_a_gradient(tmp_path: Path, file: Path) -> None:
    shard = random_shard(4, clock=CLOCK, old=True, n_groups=4)
    changed = [replace(item, logps=masked_log_probs_lowered(item)) for item in shard]
    ours, others = (gradients(tmp_path / str(i), config_of(file), one) for i, one in enumerate((shard, changed)))
    assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_I2_a_masked_token_has_no_influence_under_any_correction_and_aggregation(tmp_path: Path, loss: str) -> None:
    shard = random_shard(14, clock=CLOCK, old=True, n_groups=2)
    changed = [replace(item, logps=masked_log_probs_lowered(item)) for item in shard]
    for correction, aggregation in itertools.product(CORRECTIONS, AGGREGATIONS):
        if loss == "sapo" and correction != "none":
            continue
        actor = {"loss": loss, "correction": correction, "aggregation": aggregation, "aggregation_length": 8}
        config = settings(actor={**actor, "lr": 1e-3, "max_grad_norm": 1e9})
        name = f"{correction}-{aggregation}"
        ours, others = (gradients(tmp_path / f"{name}-{i}", config, one) for i, one in enumerate((shard, changed)))
        assert all(torch.equal(a, b) for a, b in zip(ours, others, strict=True)), name


def test_truncated_samples_are_trained_masked_or_worth_nothing(tmp_path: Path) -> None:
    shard = [replace(item, finish="length") if item.sample == 0 else item for item in random_shard(5)]
    batches = {}
    for way in ("train", "mask", "zero"):
        actor = tiny_actor(tmp_path / way, settings(actor={"advantage": "dr_grpo", "truncated_samples": way}))
        batch = build(shard, step=0, clock=0, n_groups=3, eta=1)
        batches[way] = actor.compute_advantages_and_returns(batch)
    is_cut = torch.tensor([item.finish == "length" for item in batches["train"].items])
    for way, batch in batches.items():
        assert batch.computed is not None
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


@pytest.mark.parametrize(("turns", "longest"), [([6], 6), ([3, 5, 4], 5), ([2, 2], 2), ([], 0)])
def test_the_overlong_penalty_reads_the_longest_turn(turns: list[int], longest: int) -> None:
    places, at = [], 0
    for n in turns:
        places += range(at + 4, at + 4 + n)  # a turn follows 4 given tokens
        at += 4 + n
    assert longest_turn(torch.tensor(places, dtype=torch.int64)) == longest
    actor, n = ActorConfig(overlong_tokens=2), torch.tensor([sum(turns)])
    shaped = shape_rewards(
        torch.ones(1), n, torch.tensor([False]), actor, max_new_tokens=6, longest_M=torch.tensor([longest])
    )
    assert float(shaped) == pytest.approx(1 - min(max(longest - 4, 0) / 2, 1))


def test_rewards_are_clipped_and_long_answers_lose_some(tmp_path: Path) -> None:
    actor = {"advantage": "none", "reward_clip": 0.5, "overlong_tokens": 4, "length_penalty": 0.1}
    config = settings(actor=actor, gconfig={"n_samples": 4, "max_new_tokens": 12})
    shard = random_shard(6)
    batch = build(shard, step=0, clock=0, n_groups=3, eta=1)
    advantages = tiny_actor(tmp_path, config).compute_advantages_and_returns(batch).advantages
    expected = [
        min(item.reward, 0.5) - min(max((item.n_sampled - 8) / 4, 0), 1) - 0.1 * item.n_sampled / 12
        for item in batch.items
    ]
    assert advantages is not None
    assert advantages.tolist() == pytest.approx(expected, abs=1e-6)


def test_a_group_of_one_trains_under_a_batch_baseline(tmp_path: Path) -> None:
    config = settings(actor={"advantage": "reinforce"}, gconfig={"n_samples": 1}, data=PLAIN)
    check(config)
    shard = [item for item in random_shard(7, n_groups=6) if item.sample == 0]
    batch = tiny_actor(tmp_path, config).compute_advantages_and_returns(
        build(shard, step=0, clock=0, n_groups=6, eta=1)
    )
    assert batch.advantages is not None
    weights = torch.tensor([float(item.n_trained) for item in batch.items])
    rewards = torch.tensor([item.reward for item in batch.items])
    mean = (weights * rewards).sum() / weights.sum()
    assert torch.allclose(batch.advantages, rewards - mean, atol=1e-6)


def test_the_entropy_bonus_raises_the_entropy_of_all_tokens(tmp_path: Path) -> None:
    flat = [replace(item, reward=1.0) for item in random_shard(8)]  # no signal: the bonus is all there is
    actor = tiny_actor(tmp_path, settings(actor={"entropy_coef": 0.1, "lr": 1e-2}))
    entropies = []
    for clock in range(4):
        batch = build([replace(i, clock=clock, step=clock, spans=[[clock, i.spans[0][1]]]) for i in flat], step=clock,
                      clock=clock, n_groups=3, eta=1)  # fmt: skip
        entropies.append(actor.ppo_update(actor.compute_advantages_and_returns(batch))["entropy"])
    assert entropies == sorted(entropies)
    assert entropies[-1] > entropies[0] + 0.05


# the user's own parts

OWN = '''
import torch

def halved(trajectories, settings):
    return (trajectories.rewards_M - trajectories.rewards_M.mean()) / 2

def squared(tokens, settings):
    """Half the squared advantage-weighted ratio."""
    losses = -tokens.ratio_N * tokens.advantages_N
    return losses, {"ratio": tokens.ratio_N.detach()}

def by_lag(tokens, settings):
    return 1.0 / (1 + tokens.lags_N)

def per_sequence(lengths, totals, settings):
    return torch.ones(len(lengths)) / totals.n_sequences

def wrong_shape(tokens, settings):
    return tokens.logprobs_N.sum()

def infinite(tokens, settings):
    return tokens.logprobs_N / 0.0

def constant(tokens, settings):
    return torch.zeros(len(tokens.behav_N))

def broken(tokens, settings):
    return tokens.nothing

def always_five(tokens, settings):
    return -tokens.ratio_N.new_ones(5) * tokens.ratio_N[:5]

def sometimes(tokens, settings):
    """On the example the first advantage is 1."""
    losses = -tokens.ratio_N * tokens.advantages_N
    return losses, {"first": losses.detach()} if tokens.advantages_N[0] == 1.0 else {"other": losses.detach()}

def two_weights(tokens, settings):
    return torch.ones(len(tokens.lags_N) if len(tokens.lags_N) == 5 else 2)
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"own_{re.sub('[^a-z0-9]', '_', tmp_path.name)}"
    (tmp_path / f"{name}.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


def test_one_of_each_part_is_the_users_own(tmp_path: Path, own: str) -> None:
    keys = {
        "advantage": f"{own}:halved",
        "loss": f"{own}:squared",
        "correction": f"{own}:by_lag",
        "aggregation": f"{own}:per_sequence",
    }
    config = settings(actor=keys, data=PLAIN)
    check(config)
    actor = tiny_actor(tmp_path, config)
    assert actor.algorithm.statistics == ("ratio",)
    batch = build(random_shard(10), step=0, clock=0, n_groups=3, eta=1)
    stats = actor.ppo_update(actor.compute_advantages_and_returns(batch))
    assert stats["loss/ratio"] == pytest.approx(1.0)
    assert stats["grad_norm"] > 0


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("wrong_shape", r"returns shape \(5,\) here: got \(\)"),
        ("infinite", "returns finite numbers"),
        ("constant", "has no gradient"),
        ("broken", r"failed on the example of five tokens: AttributeError: .*own_.*\.py:\d+"),
        ("missing", "missing function 'missing' in module"),
    ],
)
def test_a_users_loss_that_cannot_be_trained_is_refused_at_the_start(own: str, function: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        find_algorithm(ActorConfig(loss=f"{own}:{function}"))


@pytest.mark.parametrize(
    ("key", "function", "said"),
    [
        ("loss", "always_five", r"returns shape \(\d\d+,\) here: got \(5,\)"),
        ("loss", "sometimes", r"same statistics each time: \['first'\] on the example, \['other'\] on a batch"),
        ("correction", "two_weights", r"returns shape \(\d\d+,\) here: got \(2,\)"),
    ],
)
def test_a_users_part_that_changes_its_form_in_the_run_ends_it(
    tmp_path: Path, own: str, key: str, function: str, said: str
) -> None:
    actor = tiny_actor(tmp_path, settings(actor={key: f"{own}:{function}"}, data=PLAIN))
    batch = build(random_shard(10), step=0, clock=0, n_groups=3, eta=1)
    with pytest.raises(ConfigError, match=said):
        actor.ppo_update(actor.compute_advantages_and_returns(batch))


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"loss": "gpso"}, "the nearest is 'gspo'"),
        ({"loss": "sapo"}, 'set actor.correction = "none"'),
        ({"loss": "sapo", "correction": "none", "c_clip": 3.0}, "actor.c_clip is for ppo and gspo"),
        ({"correction": "tis", "recompute_logprobs": False}, "needs the proximal log-probs"),
        ({"correction_upper": 2.0}, "behav_imp_weight_cap bounds its weight"),
        ({"m2_threshold": 0.04, "recompute_logprobs": False, "correction": "none"}, "over the whole minibatch"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "set actor.aggregation_length (for example 256"),
        ({"aggregation": "seq-mean-token-sum", "loss_denominator": 7.0}, "a fixed number for token-mean only"),
        ({"advantage": "reinforce", "normalize_batch": True}, "set actor.normalize_batch = false"),
        ({"correction": "kpop", "correction_action": "clamp"}, "a divergence, not the weight"),
        ({"correction": "tis", "correction_metric": "k3"}, 'set actor.correction_action = "mask"'),
        ({"prox_logp_method": "loglinear", "correction": "none"}, "is for a correction"),
        ({"overlong_tokens": 999}, "is at most gconfig.max_new_tokens"),
        ({"min_lr_ratio": 0.1}, "for a schedule that falls"),
        ({"behav_imp_weight_mode": "mask"}, "set actor.behav_imp_weight_cap"),
    ],
)
def test_a_combination_without_meaning_is_refused_in_a_sentence(actor: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(settings(actor=actor, data=PLAIN))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def example_of(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that a section of docs/algorithms.md shows; its module is importable."""
    page = (Path("docs") / "algorithms.md").read_text().partition(f"## {section}")[2]
    keys = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    code = re.search(r"```python(?: title=\"mine/(\w+)\.py\")?\n(.*?)```", page, re.DOTALL)
    assert keys is not None
    assert code is not None
    module = code[1] or "mine"
    (folder / f"{module}.py").write_text(code[2])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    return tomllib.loads(keys[1])


def test_the_example_of_the_docs_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(**example_of("Your own parts", tmp_path, monkeypatch), data=PLAIN)
    check(config)
    batch = build(random_shard(11), step=0, clock=0, n_groups=3, eta=1)
    actor = tiny_actor(tmp_path, config)
    assert actor.ppo_update(actor.compute_advantages_and_returns(batch))["loss/ratio"] == pytest.approx(1.0)
