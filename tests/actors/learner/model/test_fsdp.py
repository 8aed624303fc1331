"""Several learner ranks, as real processes with FSDP2 (or HSDP) over gloo, are one learner."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

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


def life(actor: PPOActor, *, index: int, size: int) -> list[dict[str, float]]:
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
    for step in range(STEPS):
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
FIGURES = {"float32": {"loss"}, MODELS: {"kl_ref", "kl_teacher", "value_loss"}, LORA: {"kl_ref"}}
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


def rank(index: int, endpoint: str, folder: str, kind: str, size: int, replicas: int, width: int) -> None:
    """Body of one process. `width`: ranks that share each sequence."""
    ranks, home = met(index, endpoint, size, replicas, width), Path(folder)
    actor = tiny_actor(home / f"rank-{index}", config_of(kind), ranks=ranks)
    if (home / CHUNKED).exists():
        actor.policy._max_logits_mib = FEW_MIB
    stats = life(actor, index=ranks.share, size=ranks.n_shares)
    named = actor.policy.parameters()
    gradients = {name: whole(p.grad).contiguous() for name, p in named.items() if p.grad is not None}
    if index == 0:
        save_file(gradients, home / "gradients.safetensors")
    saved = save(actor, home / "checkpoints")
    snapshot = take_snapshot(
        STEPS, actor.policy.pushed(), is_root=index == 0, bucket_bytes=1 << 20, dtype=actor.policy.push_dtype
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


CASES = [  # kind, ranks, copies of the model, ranks that share each sequence; how near weights and gradients are
    ("float32", 4, 2, 1, 1e-4),
    (MODELS, 2, 1, 1, 1e-4),
    (LORA, 2, 1, 1, 1e-4),
    (MODELS, 2, 1, 2, 5e-6),  # a critic's values carry the rounding of other micro-batches on
    pytest.param(MODELS, 4, 2, 2, 1e-5, marks=pytest.mark.soak),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size", "replicas", "width", "near"), CASES)
def test_several_ranks_equal_one(tmp_path: Path, kind: str, size: int, replicas: int, width: int, near: float) -> None:
    """Figures, gradients, weights and what is pushed. Packed sequences of several lengths share their prompts; copies
    and ranks that share sequences compute the head in chunks.
    """
    if replicas * width > 1:
        (tmp_path / CHUNKED).touch()
    stage = {"folder": str(tmp_path), "kind": kind, "size": size, "replicas": replicas, "width": width}
    run_ranks(__name__, rank.__name__, stage)
    several = [json.loads((tmp_path / f"{index}.json").read_text()) for index in range(size)]
    one = tiny_actor(tmp_path / "one", config_of(kind))
    for step, figures in enumerate(life(one, index=0, size=1)):
        assert FIGURES[kind] <= figures.keys()
        wanted = {name: pytest.approx(value, abs=1e-5, rel=1e-4) for name, value in figures.items()}
        close = {name: pytest.approx(figures[name], rel=near, abs=1e-6) for name in ("loss", "grad_norm")}
        assert [result["stats"][step] for result in several] == [wanted | close] * size
    assert [result["restored"] for result in several] == [True] * size
    saved, named = tmp_path / "checkpoints" / f"step-{STEPS:06d}", one.policy.parameters()
    checkpoint.verify(saved)
    held = weights_in(saved / "model")
    assert far(held, {name: parameter.detach() for name, parameter in named.items()}) < near
    gradients = {name: p.grad for name, p in named.items() if p.grad is not None}
    assert far(load_file(tmp_path / "gradients.safetensors"), gradients) < 2 * near
    base = {} if one.policy.adapters is None else one.policy.adapters.digest()
    assert several[0]["digest"] == digest_of(held | base)
    if kind == MODELS:  # the reference is the policy of version 2
        reference, start = weights_in(saved / "reference"), dict(tiny_model(1).named_parameters())
        assert far(reference, one.frozen.reference.parameters()) < 1e-4
        assert all(not torch.equal(reference[name], value) for name, value in start.items())


def far(found: dict[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    """Norm of the difference, relative to the norm."""
    differences = [found[name] - value for name, value in wanted.items()]
    return float(get_total_norm(differences) / get_total_norm(list(wanted.values())))


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    """Of a model folder, of which each rank has written a file, or of adapters."""
    if (folder / "adapter_model.safetensors").exists():
        held = load_file(folder / "adapter_model.safetensors")
        return {name.removeprefix("base_model.model."): value for name, value in held.items()}
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 1
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}
