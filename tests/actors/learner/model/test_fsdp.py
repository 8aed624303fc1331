"""Several learner ranks, as real processes with FSDP2 (or HSDP) over gloo, are one learner."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.utils import get_total_norm

from actors.learner.batching import build
from actors.learner.checkpoint import checkpoint
from actors.learner.link.rendezvous import part
from actors.learner.model.policy import whole
from actors.learner.model.startup import Demonstration, warm_up
from actors.learner.update.ppo import PPOActor
from areal_bus.config.learner import WarmupConfig
from areal_bus.config.sections import Config
from areal_bus.messages import ShardItem
from areal_bus.weights.snapshot import digest_of, take_snapshot
from tests.support.forked_ranks import met, run_ranks
from tests.support.learner_setup import random_shard, save, settings, tiny_actor, tiny_model

STEPS = 3
CHUNKED = "chunked"  # a file by which a test asks for the head in chunks
FEW_MIB = 23 * 4 * 9 / 2**20  # a logits matrix of nine tokens


def life(actor: PPOActor, *, index: int, size: int, steps: int = STEPS) -> list[dict[str, float]]:
    """A warm-up and updates; each rank gets every `size`-th group, rank 1 none at all in step 1."""
    demonstrations = [Demonstration(prompt=[5, 6], completion=[2 + i, 3, 1]) for i in range(7)]
    warm_up(
        actor.policy,
        demonstrations,
        WarmupConfig(steps=2, lr=1e-4),
        seed=1,
        capacity=16,
        journal=actor._journal,
        heartbeat=actor._context.heartbeat,
    )
    stats = []
    for step in range(steps):
        drawn = random_shard(step, clock=step, n_groups=4)
        drawn = [replace(i, reward=1.0) if i.group == 3 else i for i in drawn]  # no signal: one rank's denominator only
        shard = [i for i in drawn if _mine(i, step, index, size)]
        batch = build(shard, step=step, clock=step, n_groups=4, eta=1)  # a rank may have no item
        stats.append(actor.ppo_update(actor.compute_advantages_and_returns(batch)) | {"update_s": 0.0})
    return stats


def _mine(item: ShardItem, step: int, index: int, size: int) -> bool:
    return size == 1 or item.group % size == index if step != 1 else index == 0


MODELS = "models"
LORA = "lora"
WITH_MODELS = {
    "advantage": "gae",
    "aggregation": "seq-mean-token-mean",
    "kl_ctl": 0.3,
    "distill_coef": 0.5,
    "reward_scaling": "running",
    "distill_beta": 0.3,
    "distill_top_k": 5,
    "entropy_coef": 0.02,
}


def config_of(kind: str = "float32") -> Config:
    """`kind`: a dtype; MODELS: with a critic, a reference, a teacher and the terms beside the surrogate loss; LORA:
    adapters, and a KL divergence from the model without them.
    """
    has_models = kind == MODELS
    return settings(
        model={"scratch": {}, "dtype": kind if kind in ("float32", "bfloat16") else "float32"},
        actor={
            "advantage": "rloo",
            "lr": 1e-3,
            "adam_eps": 1e-4,
            "normalize_batch": True,
            **(WITH_MODELS if has_models else {}),
            **({"lora": {"rank": 4, "variant": ["rslora", "dora"]}, "kl_ctl": 0.3} if kind == LORA else {}),
        },
        reference={"update_every": 2 if has_models else 0},
        critic={"lr": 1e-4} if has_models else {},
        learner={"max_tokens_per_mb": 24},
    )


def rank(index: int, endpoint: str, folder: str, kind: str, size: int, replicas: int, width: int, steps: int) -> None:
    """Body of one process. `width`: ranks that share each sequence."""
    ranks, home = met(index, endpoint, size, replicas, width), Path(folder)
    actor = tiny_actor(home / f"rank-{index}", config_of(kind), ranks=ranks)
    if (home / CHUNKED).exists():
        actor.policy._max_logits_mib = FEW_MIB
    stats = life(actor, index=ranks.share, size=ranks.n_shares, steps=steps)
    named = actor.policy.parameters()
    gradients = {name: whole(p.grad).contiguous() for name, p in named.items() if p.grad is not None}
    if index == 0:
        save_file(gradients, home / "gradients.safetensors")
    saved = save(actor, home / "checkpoints")
    snapshot = take_snapshot(
        steps, actor.policy.pushed(), is_root=index == 0, bucket_bytes=1 << 20, dtype=actor.policy.push_dtype
    )
    before = state_of(actor)
    if actor.policy.dtype is not torch.float32:  # else the weights come from the model's folder
        with torch.no_grad():
            for parameter in named.values():
                parameter.zero_()
    checkpoint.restore(checkpoint.load(saved), policy=actor.policy, optimizer=actor.optimizer)
    after = state_of(actor)
    same = after.keys() == before.keys() and all(torch.equal(after[name], value) for name, value in before.items())
    digest = snapshot.digest if snapshot is not None else None
    (home / f"{index}.json").write_text(json.dumps({"stats": stats, "digest": digest, "restored": same}))
    part()


def state_of(actor: PPOActor) -> dict[str, torch.Tensor]:
    """Whole weights and optimizer states. A collective."""
    found = {}
    for name, parameter in actor.policy.parameters().items():
        for kind, value in {"": parameter, **actor.optimizer.state[parameter]}.items():
            found[f"{name} {kind}"] = whole(value).detach().clone()
    return found


def several_ranks(
    folder: Path, kind: str, size: int = 2, replicas: int = 1, *, width: int = 1, steps: int = STEPS
) -> list[dict[str, Any]]:
    """What each rank wrote down."""
    stage = {"folder": str(folder), "kind": kind, "size": size, "replicas": replicas, "width": width, "steps": steps}
    run_ranks(__name__, rank.__name__, stage)
    return [json.loads((folder / f"{index}.json").read_text()) for index in range(size)]


def check_figures(several: list[dict[str, Any]], expected: list[dict[str, float]]) -> None:
    for step, figures in enumerate(expected):
        wanted = {name: pytest.approx(value, abs=1e-5, rel=1e-4) for name, value in figures.items()}
        assert [result["stats"][step] for result in several] == [wanted] * len(several)
    assert [result["restored"] for result in several] == [True] * len(several)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "replicas"), [("float32", 4, 2), (MODELS, 2, 1)])
def test_several_ranks_equal_one(tmp_path: Path, kind: str, size: int, replicas: int) -> None:
    """Four ranks are two copies of the model, each sharded over two; they compute the head in chunks. Two ranks have a
    critic, a reference and a teacher, too.
    """
    if kind != MODELS:
        (tmp_path / CHUNKED).touch()
    several = several_ranks(tmp_path, kind, size, replicas)
    one = tiny_actor(tmp_path / "one", config_of(kind))
    expected = life(one, index=0, size=1)
    check_figures(several, expected)
    model = checkpoint_model(tmp_path)
    for name, value in one.policy.parameters().items():
        assert torch.allclose(model[name], value, atol=1e-5), name
    held = tiny_model()
    held.load_state_dict(model)
    assert several[0]["digest"] == digest_of(dict(held.named_parameters()))
    if kind == MODELS:
        assert {"kl_ref", "kl_teacher", "value_loss"} <= set(expected[0])
        check_reference(tmp_path, one)


def check_reference(folder: Path, one: PPOActor) -> None:
    """The checkpoint holds the reference model, which is the policy of version 2."""
    saved = weights_in(folder / "checkpoints" / f"step-{STEPS:06d}" / "reference")
    for name, value in one.frozen.reference.parameters().items():
        assert torch.allclose(saved[name], value, atol=1e-5), name
        assert not torch.equal(saved[name], dict(tiny_model(1).named_parameters())[name]), name


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    differences = [found[name] - value for name, value in wanted.items()]
    return float(get_total_norm(differences) / get_total_norm(list(wanted.values())))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "size", "replicas", "near"),
    [(MODELS, 2, 1, 5e-6), pytest.param(MODELS, 4, 2, 1e-5, marks=pytest.mark.soak)],
)
def test_ranks_that_share_each_sequence_equal_one(
    tmp_path: Path, kind: str, size: int, replicas: int, near: float
) -> None:
    """Packed sequences of several lengths, prompts shared, the head in chunks: loss, gradient and weights.

    Of four ranks two share each sequence, and two hold a copy of the model. A critic's values carry its rounding on:
    one rank whose sequences are cut into other micro-batches differs by up to 1.4e-6, too.
    """
    (tmp_path / CHUNKED).touch()
    steps = 3
    several = several_ranks(tmp_path, kind, size, replicas, width=2, steps=steps)
    one = tiny_actor(tmp_path / "one", config_of(kind))
    expected = life(one, index=0, size=1, steps=steps)
    for step in range(steps):
        for result in several:
            found = result["stats"][step]
            assert found["loss"] == pytest.approx(expected[step]["loss"], rel=near, abs=1e-6)
            assert found["grad_norm"] == pytest.approx(expected[step]["grad_norm"], rel=near)
    model = weights_in(tmp_path / "checkpoints" / f"step-{steps:06d}" / "model")
    assert far(model, {name: p.detach() for name, p in one.policy.parameters().items()}) < near
    gradients = {name: p.grad for name, p in one.policy.parameters().items() if p.grad is not None}
    assert far(load_file(str(tmp_path / "gradients.safetensors")), gradients) < 2 * near
    check_figures(several, expected)


@pytest.mark.slow
def test_two_ranks_with_adapters_equal_one(tmp_path: Path) -> None:
    two = several_ranks(tmp_path, LORA)
    one = tiny_actor(tmp_path / "one", config_of(LORA))
    expected = life(one, index=0, size=1)
    assert expected[0]["kl_ref"] > 0  # of the warm-up
    check_figures(two, expected)
    saved = tmp_path / "checkpoints" / f"step-{STEPS:06d}" / "model" / "adapter_model.safetensors"
    held = {name.removeprefix("base_model.model."): value for name, value in load_file(str(saved)).items()}
    for name, value in one.policy.parameters().items():
        assert torch.allclose(held[name], value, atol=1e-5), name
    assert two[0]["digest"] == digest_of(held | one.policy.adapters.digest())  # type: ignore[union-attr]


def checkpoint_model(folder: Path) -> dict[str, torch.Tensor]:
    saved = folder / "checkpoints" / f"step-{STEPS:06d}"
    checkpoint.verify(saved)
    config = json.loads((saved / "model" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    return weights_in(saved / "model")


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of a Hugging Face folder, of which each rank has written a file."""
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    found = [load_file(folder / name) for name in files]
    assert len(found) > 1
    return {name: tensor for one in found for name, tensor in one.items()}
