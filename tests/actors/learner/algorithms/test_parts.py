"""Streams of a batch: fields of a workflow or a loop, and what the parts of an algorithm make of them."""

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from actors.learner.algorithms.parts import Tokens, needs
from actors.learner.algorithms.registry import find_algorithm
from actors.learner.update.advantage_stage import trajectories_of
from actors.rewards.actor import scored
from actors.rewards.pool import Verdict
from areal_bus import authorization, sample_fields
from areal_bus.config.learner import ActorConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError
from areal_bus.messages import ShardItem, VerdictStatus
from tests.actors.rewards.test_actor import trajectory
from tests.support.learner_setup import PLAIN, batch_of, prepared, random_shard, settings, tiny_actor, update


def with_fields(shard: list[ShardItem], **fields: float) -> list[ShardItem]:
    """Each number belongs to all tokens of an item, times its index."""
    packed = [
        {name: np.full(len(item.logps) // 4, value * i, "<f4").tobytes() for name, value in fields.items()}
        for i, item in enumerate(shard)
    ]
    return [replace(item, fields=sample_fields.packed(own)) for item, own in zip(shard, packed, strict=True)]


def own_part(monkeypatch: pytest.MonkeyPatch, part: Any, key: str = "loss") -> Config:
    monkeypatch.setitem(sys.modules, "mine", SimpleNamespace(**({} if part is None else {key: part})))
    return settings(actor={key: f"mine:{key}"}, data=PLAIN)


def test_a_loss_sees_the_fields_of_trained_tokens_however_the_batch_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @needs("index", "prox", twice=lambda streams, _: 2 * streams["index"])
    def loss(tokens: Tokens, _: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
        index, twice = tokens.streams["index"], tokens.streams["twice"]
        return -tokens.logprobs_N * tokens.advantages_N * twice, {"gap": twice - 2 * index, "index": index}

    config = own_part(monkeypatch, loss)
    shard = with_fields(random_shard(3, clock=4, old=True, n_groups=4), index=1.0)
    found = []
    for budget in (1, 60, 9999):
        cut = config.model_copy(update={"learner": config.learner.model_copy(update={"max_tokens_per_mb": budget})})
        actor = tiny_actor(tmp_path / str(budget), cut)
        batch = prepared(actor, shard, eta=2)
        stats = actor.ppo_update(batch)
        trained = [(i, item.n_trained) for i, item in enumerate(batch.items)]
        assert stats["loss/gap"] == 0
        assert stats["loss/index"] == pytest.approx(sum(i * n for i, n in trained) / sum(n for _, n in trained))
        found.append(stats["grad_norm"])
    assert found == pytest.approx([found[0]] * 3, rel=1e-4)


def test_an_estimator_sees_the_mean_of_a_field_over_the_whole_trajectory() -> None:
    shard = with_fields(random_shard(3, clock=9, old=True), index=1.0)
    batch = batch_of(shard, clock=9, eta=0)
    assert any(item.n_trained < item.n_sampled for item in batch.items)
    batch.add("of_the_loop", dict.fromkeys(range(len(shard)), 0.25))
    streams = trajectories_of(batch, settings()).streams
    assert streams["index"].tolist() == list(range(len(shard)))
    assert set(streams["of_the_loop"].tolist()) == {0.25}


def test_a_field_that_a_trajectory_lacks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    actor = tiny_actor(tmp_path, own_part(monkeypatch, needs("index")(lambda t, _: -t.logprobs_N * t.streams["index"])))
    shard = random_shard(3)
    with pytest.raises(ConfigError, match=r"missing stream 'index' in 9 of 12 trajectories \(first uid 0\)"):
        prepared(actor, [*with_fields(shard[:3], index=1.0), *shard[3:]])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda t, _: t.logprobs_N.sum(), r"must return shape \(5,\): it returned \(\)"),
        (lambda t, _: t.logprobs_N / 0.0, "must return finite numbers"),
        (lambda t, _: torch.zeros(5), "has no gradient"),
        (lambda t, _: t.nothing, r"failed on the example of five tokens: AttributeError: .*test_parts\.py:\d+"),
        (None, "missing function 'loss' in module 'mine'"),
        (lambda t, _: t.logprobs_N * t.streams["x"], "missing stream 'x': the part must declare it"),
        (needs("reference")(lambda t, _: t.logprobs_N), "missing stream 'reference'"),
        (needs("returns")(lambda t, _: t.logprobs_N), "'returns' is taken"),
        (needs("no name")(lambda t, _: t.logprobs_N), "invalid field name"),
        (needs(x=lambda s, _: s["behav"][:1])(lambda t, _: t.logprobs_N), r"\(5,\): it returned \(1,\)"),
        (needs(x=lambda s, _: s["y"])(lambda t, _: t.logprobs_N), "missing stream 'y'"),
    ],
)
def test_a_loss_that_cannot_be_trained_is_refused_at_the_start(
    monkeypatch: pytest.MonkeyPatch, loss: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        find_algorithm(own_part(monkeypatch, loss).actor)


def statistics_of_the_first_advantage(tokens: Tokens, _: ActorConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """On the example it is 1."""
    losses = -tokens.ratio_N * tokens.advantages_N
    return losses, {"first" if tokens.advantages_N[0] == 1.0 else "other": losses.detach()}


@pytest.mark.parametrize(
    ("key", "part", "said"),
    [
        ("loss", lambda t, _: -t.ratio_N[:5], r"must return shape \(\d\d+,\): it returned \(5,\)"),
        ("loss", statistics_of_the_first_advantage, r"\['first'\] on the example, \['other'\] on a batch"),
        (
            "correction",
            lambda t, _: torch.ones(min(len(t.lags_N), 5)),
            r"must return shape \(\d\d+,\): it returned \(5,\)",
        ),
    ],
)
def test_a_part_that_changes_its_form_in_the_run_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str, part: Any, said: str
) -> None:
    actor = tiny_actor(tmp_path, own_part(monkeypatch, part, key))
    with pytest.raises(ConfigError, match=said):
        update(actor, random_shard(10))


@pytest.mark.parametrize(
    ("name", "values", "said"),
    [
        ("prox", 1.0, "'prox' exists"),
        ("x", torch.zeros(99), "mismatch in the stream 'x' of uid 0"),
        ("x", float("nan"), "finite numbers are needed"),
    ],
)
def test_a_stream_of_a_loop_that_does_not_fit_the_batch_is_refused(name: str, values: Any, said: str) -> None:
    batch = batch_of(random_shard(3))
    with pytest.raises(ConfigError, match=said):
        batch.add(name, {0: values})


@pytest.mark.parametrize("names", ["prox", "a a", "a-b", "1a", "x" * 41, "", " ".join(f"a{i}" for i in range(17))])
def test_fields_of_a_forbidden_name_are_refused_by_generators_rewards_and_head(names: str) -> None:
    assert sample_fields.broken_rule(names.split(" "))
    sampled = trajectory(0, "text")
    for message in (sampled, scored(sampled, Verdict(0, VerdictStatus.VALUE, 1.0, None, "", 0.0))):
        assert not authorization.broken_limit(message)
        assert "at most 16 fields" in authorization.broken_limit(replace(message, fields=f"{names}\n".encode()))
