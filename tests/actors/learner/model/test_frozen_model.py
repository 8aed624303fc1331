"""Reference and teacher of a learner: where they come from, when they change, and what a resume restores."""

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.learner.checkpoint import checkpoint
from actors.learner.model.frozen_model import load_frozen_models
from actors.learner.update.ppo import PPOActor
from actors.models.loading import load_model
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from tests.support.learner_setup import resume, save, settings, tiny_actor, tiny_model, train, weights


def config_of(**reference: Any) -> Config:
    return settings(model={"path": "model"}, actor={"kl_ctl": 0.1, "lr": 1e-2, "adam_eps": 1e-4}, reference=reference)


def model_folder(folder: Path, seed: int) -> str:
    tiny_model(seed).save_pretrained(folder)
    return str(folder)


def train_on(actor: PPOActor, n: int) -> list[dict[str, float]]:
    return train(actor, range(actor.version, actor.version + n))


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def begin(folder: Path, config: Config, *, checkpoint: str = "", model: str = "") -> PPOActor:
    """An actor as the learner makes it: policy, frozen models, then the state of the checkpoint."""
    actor = tiny_actor(folder, config)
    if checkpoint:
        actor.policy.model.load_state_dict(load_model(f"{checkpoint}/model", "float32", "cpu").state_dict())
        resume(actor, Path(checkpoint))
    actor.frozen = load_frozen_models(config, actor.policy, model=model, config_folder=folder, checkpoint=checkpoint)
    return actor


def test_a_reference_without_a_path_is_version_0_of_the_run_with_its_warm_up(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", 0)
    actor = tiny_actor(tmp_path, config_of())
    with torch.no_grad():
        for parameter in actor.policy.parameters().values():
            parameter += 0.01  # a warm-up
    frozen = load_frozen_models(config_of(), actor.policy, model=model, config_folder=tmp_path)
    assert frozen.teacher is None
    assert are_equal(weights(frozen.reference), weights(actor.policy))
    assert not any(parameter.requires_grad for parameter in frozen.reference.parameters().values())


def test_a_fixed_reference_stays_and_its_checkpoint_holds_none(tmp_path: Path) -> None:
    model = model_folder(tmp_path / "model", 0)
    actor = begin(tmp_path, config_of(), model=model)
    stats = train_on(actor, 3)
    assert stats[0]["kl_ref"] == 0.0
    assert stats[2]["kl_ref"] > 1e-4
    assert are_equal(weights(actor.frozen.reference), dict(tiny_model(0).named_parameters()))
    saved = str(save(actor, tmp_path))
    assert not (Path(saved) / "reference").exists()
    again = begin(tmp_path / "again", config_of(), checkpoint=saved, model=model)
    assert are_equal(weights(again.frozen.reference), weights(actor.frozen.reference))


def test_a_reference_that_follows_the_policy_survives_a_resume_between_two_of_its_updates(tmp_path: Path) -> None:
    config, model = config_of(update_every=2), model_folder(tmp_path / "model", 0)
    whole = begin(tmp_path / "whole", config, model=model)
    expected = train_on(whole, 6)
    assert [stats["kl_ref"] == 0.0 for stats in expected] == [True, False] * 3
    first = begin(tmp_path / "first", config, model=model)
    train_on(first, 3)  # the reference is version 2
    saved = str(save(first, tmp_path))
    checkpoint.verify(Path(saved))
    second = begin(tmp_path / "second", config, checkpoint=saved, model=model)
    assert train_on(second, 3) == expected[3:]
    assert are_equal(weights(second.policy), weights(whole.policy))


def test_a_checkpoint_without_the_reference_that_the_run_made_is_refused(tmp_path: Path) -> None:
    actor = begin(tmp_path, settings(), model="")
    saved = str(save(actor, tmp_path))
    with pytest.raises(ConfigError, match=r"missing reference model in .*: actor\.kl_ctl or update_every was 0"):
        begin(tmp_path / "again", config_of(update_every=1), checkpoint=saved)


def test_a_frozen_model_computes_in_the_dtype_of_the_run_and_follows_a_float32_policy(tmp_path: Path) -> None:
    config = config_of(update_every=1).model_copy(
        update={"model": settings(model={"path": "m", "dtype": "bfloat16"}).model}
    )
    actor = begin(tmp_path, config, model=model_folder(tmp_path / "model", 0))
    reference = actor.frozen.reference
    stats = train_on(actor, 2)
    assert {p.dtype for p in reference.parameters().values()} == {torch.bfloat16}
    rounded = {name: value.bfloat16() for name, value in weights(actor.policy).items()}
    assert are_equal(weights(reference), rounded)
    assert stats[1]["kl_ref"] < 1e-3, "rounding alone"


def test_a_teacher_with_fewer_words_is_refused(tmp_path: Path) -> None:
    small = tiny_model(1)
    small.resize_token_embeddings(20)
    small.save_pretrained(tmp_path / "small")
    config = settings(actor={"advantage": "distill"}, teacher={"path": "small"})
    with pytest.raises(ConfigError, match=r"every word of the policy: .* has 20 of 23"):
        begin(tmp_path, config)
