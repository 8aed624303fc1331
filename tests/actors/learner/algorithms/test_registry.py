"""Algorithms by name, shipped or the user's own: what each computes within PPOActor, and settings that are refused."""

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.algorithms.advantages import ESTIMATORS
from actors.learner.algorithms.corrections import CORRECTIONS
from actors.learner.algorithms.losses import AGGREGATIONS, LOSSES
from areal_bus.config import algorithms as names
from areal_bus.config.loader import load
from areal_bus.config.sections import Config
from areal_bus.config.validation import check
from areal_bus.errors import ConfigError
from tests.support.learner_setup import (
    PLAIN,
    gradients,
    masked_log_probs_lowered,
    random_shard,
    settings,
    tiny_actor,
    update,
)

FILES = sorted(Path("configs/algorithms").glob("*.toml"))
RUN = Path("configs/tiny.toml")
CLOCK = 3
VARIANTS: dict[str, dict[str, Any]] = {  # [actor], beside the shipped ones
    "k2 in the loss": {"kl_ctl": 0.3, "kl_estimator": "k2"},
    "k3 in the loss": {"kl_ctl": 0.3, "aggregation": "seq-mean-token-mean", "ppo_n_minibatches": 2},
    "k1 in the reward": {"kl_ctl": 0.3, "kl_in": "reward", "kl_estimator": "k1"},
    "unset in the reward": {"kl_ctl": 0.3, "kl_in": "reward", "recompute_logprobs": False, "correction": "none"},
    "distillation beside the reward": {"distill_coef": 0.5, "advantage": "rloo"},
    "distillation with KL": {"advantage": "distill", "kl_ctl": 0.1},
}


def of_a_file(file: Path) -> dict[str, Any]:
    words = ["teacher.path=TEACHER"] if file.stem == "distill" else []
    return load([RUN, file], words, {}).actor.model_dump()


@pytest.fixture(params=[*FILES, *VARIANTS], ids=lambda one: one if isinstance(one, str) else one.stem)
def actor_keys(request: pytest.FixtureRequest) -> dict[str, Any]:
    """[actor] of each shipped algorithm and of each variant."""
    keys = VARIANTS[request.param] if isinstance(request.param, str) else of_a_file(request.param)
    return keys | {"lr": 1e-3, "max_grad_norm": 1e9}


def config_of(keys: dict[str, Any], **learner: Any) -> Config:
    """On the small model of the tests."""
    return settings(actor=keys, learner=learner, gconfig={"n_samples": 4, "max_new_tokens": 12})


def test_how_a_minibatch_is_cut_changes_no_gradient(tmp_path: Path, actor_keys: dict[str, Any]) -> None:
    """Of the policy and of a critic; half of the tokens are too old."""
    shard = random_shard(3, clock=CLOCK, old=True, n_groups=4)
    found = []
    for budget in (1, 60):
        actor = tiny_actor(tmp_path / str(budget), config_of(actor_keys, max_tokens_per_mb=budget))
        found.append(gradients(actor, shard))
    assert any(float(g.abs().max()) > 1e-4 for g in found[0])
    torch.testing.assert_close(*found, atol=1e-6, rtol=1e-4)


def check_masked_change_nothing(folder: Path, config: Config, seed: int, *, n_groups: int) -> None:
    shard = random_shard(seed, clock=CLOCK, old=True, n_groups=n_groups)
    pair = enumerate((shard, masked_log_probs_lowered(shard)))
    ours, others = (gradients(tiny_actor(folder / str(i), config), one) for i, one in pair)
    torch.testing.assert_close(ours, others, rtol=0, atol=0)


def test_I2_a_masked_token_has_no_influence_on_a_gradient(tmp_path: Path, actor_keys: dict[str, Any]) -> None:
    check_masked_change_nothing(tmp_path, config_of(actor_keys), 4, n_groups=4)


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_I2_a_masked_token_has_no_influence_under_any_correction_and_aggregation(tmp_path: Path, loss: str) -> None:
    for i, correction in enumerate(CORRECTIONS if loss != "sapo" else ["none"] * len(AGGREGATIONS)):
        aggregation = list(AGGREGATIONS)[i % len(AGGREGATIONS)]
        keys = {"loss": loss, "correction": correction, "aggregation": aggregation, "aggregation_length": 8}
        config = settings(actor={**keys, "lr": 1e-3, "max_grad_norm": 1e9})
        check_masked_change_nothing(tmp_path / f"{correction}-{aggregation}", config, 14, n_groups=2)


def test_names_of_the_settings_and_of_the_functions_are_the_same() -> None:
    assert tuple(ESTIMATORS) == names.ADVANTAGES
    assert tuple(LOSSES) == names.LOSSES
    assert tuple(CORRECTIONS) == names.CORRECTIONS
    assert tuple(AGGREGATIONS) == names.AGGREGATIONS
    assert {name for name, one in ESTIMATORS.items() if one.has_group_baseline} == set(names.GROUP_BASELINES)
    assert {name for name, one in ESTIMATORS.items() if one.normalization} == set(names.BATCH_BASELINES)


# the user's own parts


def example_of(section: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The settings that a section of docs/own-parts.md shows; its module is importable."""
    page = (Path("docs") / "own-parts.md").read_text().partition(f"## {section}")[2]
    keys = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    code = re.search(r"```python(?: title=\"mine/(\w+)\.py\")?\n(.*?)```", page, re.DOTALL)
    module = code[1] or "mine"
    (folder / f"{module}.py").write_text(code[2])
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    return tomllib.loads(keys[1])


def test_the_example_of_the_docs_with_one_of_each_part_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(**example_of("Your own parts", tmp_path, monkeypatch), data=PLAIN)
    check(config)
    actor = tiny_actor(tmp_path, config)
    assert actor.algorithm.statistics == ("ratio",)
    stats = update(actor, random_shard(11))
    assert stats["loss/ratio"] == pytest.approx(1.0)
    assert stats["grad_norm"] > 0


# settings without meaning

TEACHER = {"teacher": {"path": "t"}}
SERVED = {"teacher": {"path": "http://127.0.0.1:1"}}


@pytest.mark.parametrize(
    ("actor", "said"),
    [
        ({"loss": "gpso"}, "the nearest is 'gspo'"),
        ({"loss": "sapo", "correction": "none", "sapo_tau": (1.0, 0.0)}, "two numbers above 0: it is [1.0, 0.0]"),
        ({"loss": "sapo"}, 'set actor.correction = "none"'),
        ({"loss": "sapo", "correction": "none", "c_clip": 3.0}, "actor.c_clip is for ppo and gspo"),
        ({"correction": "tis", "recompute_logprobs": False}, "needs the proximal log-probs"),
        ({"correction_upper": 2.0}, "behav_imp_weight_cap bounds its weight"),
        ({"m2_threshold": 0.04, "recompute_logprobs": False, "correction": "none"}, "over the whole minibatch"),
        ({"aggregation": "seq-mean-token-sum-norm"}, "set it (for example 256"),
        ({"aggregation": "seq-mean-token-sum", "loss_denominator": 7.0}, "a number for token-mean only"),
        ({"advantage": "reinforce", "normalize_batch": True}, "set actor.normalize_batch = false"),
        ({"correction": "kpop", "correction_action": "clamp"}, "bounds no weight"),
        ({"correction": "tis", "correction_metric": "k3"}, 'set actor.correction_action = "mask"'),
        ({"prox_logp_method": "loglinear", "correction": "none"}, "is for a correction"),
        ({"correction": "entropy_scaled", "correction_action": "clamp"}, "bounds no weight"),
        ({"correction": "vcpo"}, 'set actor.loss = "reinforce"'),
        ({"correction": "vcpo", "advantage": "distill", "distill_beta": 1.0}, 'vcpo" has nothing to weigh'),
        ({"loss": "oapl"}, 'takes no weight: set actor.correction = "none" (it is "decoupled")'),
        ({"loss": "oapl", "correction": "none", "m2_threshold": 0.1}, "masks tokens: remove it"),
        ({"loss": "oapl", "correction": "none", "advantage": "gae"}, '"gae" gives one to each token'),
        ({"loss": "oapl", "correction": "none", "distill_coef": 0.1, **TEACHER}, "a teacher gives one to each token"),
        ({"overlong_tokens": 999}, "is at most gconfig.max_new_tokens"),
        ({"min_lr_ratio": 0.1}, "for a schedule that falls"),
        ({"correction_action": "mask"}, "set actor.behav_imp_weight_cap"),
        ({"correction_action": "clamp"}, "set actor.behav_imp_weight_cap"),
        ({"kl_ctl": 0.1, "kl_estimator": "k1"}, 'set "k2"'),
        ({"kl_estimator": "k2"}, "set actor.kl_ctl (it is 0)"),
        ({"kl_ctl": 0.1, "kl_in": "reward", "kl_estimator": "k2"}, "refused in the reward"),
        ({"kl_ctl": 0.1, "kl_in": "reward", "kl_estimator": "k3"}, "refused in the reward"),
        ({"reference": {"update_every": 5}}, "set actor.kl_ctl (it is 0), or remove the section"),
        ({"advantage": "distill"}, "missing teacher.path"),
        ({"distill_coef": 0.1}, "missing teacher.path"),
        (TEACHER, "names a model that nothing uses"),
        ({"advantage": "distill", "distill_coef": 0.1, **TEACHER}, "remove one of them"),
        ({"advantage": "distill", "reward_clip": 1.0, **TEACHER}, "remove actor.reward_clip"),
        ({"advantage": "distill", "kl_ctl": 0.1, "kl_in": "reward", **TEACHER}, "remove actor.kl_in"),
        (
            {"advantage": "distill", **SERVED, "gconfig": {"temperature": 0.7}},
            "set gconfig.temperature = 1 (it is 0.7)",
        ),
        ({"advantage": "distill", "distill_beta": 0.0, **SERVED}, "missing actor.distill_top_k"),
        *(
            ({"advantage": "distill", "teacher": {"path": url}}, "invalid URL in teacher.path: it must be http://HOST")
            for url in (
                "http://",
                "http://a b",
                "http://me:word@a:1",
                "http://[::1",
                "http://a:1?b",
                "ftp://a",
                " http://a",
            )
        ),
        ({"distill_beta": 0.0}, "actor.distill_beta (0) is for distillation"),
        ({"advantage": "distill", "distill_top_k": 4, **TEACHER}, "needs actor.distill_beta"),
        ({"critic": {"lr": 1e-3}}, '[critic] is for actor.advantage = "gae": it is "grpo"; remove critic.lr'),
        ({"gae_lambda": 0.9}, "are for actor.advantage"),
        ({"truncated_samples": "bootstrap"}, "needs the values of a critic"),
        ({"advantage": "gae", "critic": {"warmup_updates": 10**6}}, "else nothing trains the policy"),
        ({"ppo_epochs": 2, "loss": "reinforce"}, "actor.ppo_epochs > 1 needs a ratio"),
        ({"ppo_epochs": 2, "prox_logp_method": "loglinear"}, "actor.ppo_epochs > 1 needs a ratio"),
        ({"optimizer": "adam"}, "unknown actor.optimizer 'adam': it is one of adamw, muon, adamw8bit, sgd"),
        ({"adamw_lr": 1e-3}, 'actor.adamw_lr is for actor.optimizer = "muon"'),
        ({"optimizer": "sgd", "adam_eps": 1e-4}, "actor.adam_eps is for AdamW"),
        ({"optimizer": "m:make", "weight_decay": 0.1}, "actor.weight_decay is for the named optimizers"),
        ({"group": [{"match": "("}]}, "wrong match in [[actor.group]]: '(' is not a regular expression"),
        ({"offload": "all"}, "topology.gpus_per_host is 0"),
        (
            {"offload": "optimizer", "optimizer": "sgd", "topology": {"gpus_per_host": 2}},
            'has nothing to move with actor.optimizer = "sgd"',
        ),
    ],
)
def test_a_combination_without_meaning_is_refused_in_a_sentence(actor: dict[str, Any], said: str) -> None:
    """A key that is a section is one; the others are of [actor]."""
    sections = {key: actor[key] for key in ("reference", "teacher", "critic", "topology", "gconfig") if key in actor}
    keys = {key: value for key, value in actor.items() if key not in sections}
    with pytest.raises(ConfigError) as refused:
        check(settings(actor=keys, **sections, data=PLAIN))
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
