"""model.dtype = "bfloat16": what is trained stays float32, what leaves is bfloat16."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from actors.learner.batching import build
from actors.learner.checkpoint import checkpoint
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor
from actors.models.packed_row import SequencePiece
from areal_bus.config.sections import Config
from areal_bus.weights.snapshot import Snapshot, digest_of, take_snapshot
from tests.actors.learner.model.test_fsdp import Words
from tests.support.learner_setup import random_shard, settings, tiny_actor, tiny_model


def config_of(**actor: Any) -> Config:
    return settings(model={"scratch": {}, "dtype": "bfloat16"}, actor={"lr": 1e-5, "lr_warmup_steps": 0, **actor})


def train(actor: PPOActor, steps: range) -> None:
    for step in steps:
        batch = build(random_shard(step, clock=step), step=step, clock=step, n_groups=3, eta=0)
        actor.ppo_update(actor.compute_advantages_and_returns(batch))


def masters(actor: PPOActor) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in actor.policy.parameters().values()]


def pushed(actor: PPOActor) -> Snapshot:
    snapshot = take_snapshot(actor.version, actor.policy.parameters(), bucket_bytes=1 << 20, dtype=actor.policy.dtype)
    assert snapshot is not None
    return snapshot


def save(actor: PPOActor, folder: Path) -> Path:
    return checkpoint.save(
        folder, policy=actor.policy, optimizer=actor.optimizer, version=actor.version, tokenizer=Words(), keep=2
    )


def test_small_updates_are_kept_until_the_pushed_weights_show_them(tmp_path: Path) -> None:
    actor = tiny_actor(tmp_path, config_of())
    first = pushed(actor).tensors()
    for step in range(6):
        before = masters(actor)
        train(actor, range(step, step + 1))
        moved = [float((a != b).float().mean()) for a, b in zip(before, masters(actor), strict=True)]
        assert min(moved) > 0.5, "a step of the optimizer moves the weights, however small it is"
    now = pushed(actor).tensors()
    assert {tensor.dtype for tensor in now.values()} == {torch.bfloat16}
    shown = torch.cat([(first[name] != now[name]).flatten() for name in now]).float().mean()
    assert 0 < shown < 0.5, "six steps of 1e-5: below half a step of bfloat16 for most, over it for some"
    state = actor.optimizer.state.values()
    assert {value.dtype for kinds in state for value in kinds.values()} == {torch.float32}


def test_compute_is_of_the_type_that_is_sampled_with() -> None:
    exact, rounded = (
        Policy(
            tiny_model(), ranks=LearnerRanks(), device="cpu", temperature=1.0, dtype=dtype, gradient_checkpointing=True
        )
        for dtype in ("float32", "bfloat16")
    )
    pieces = [SequencePiece(torch.arange(2, 2 + n), torch.arange(1, n), family=0) for n in (5, 9, 9)]
    seen: list[torch.dtype] = []
    rounded.model.model.layers[0].mlp.down_proj.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    for policy in (exact, rounded):
        torch.autograd.backward([policy.logprobs(pieces)[0].sum()])
    assert set(seen) == {torch.bfloat16}
    for ours, theirs in zip(rounded.parameters().values(), exact.parameters().values(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        assert ours.grad.dtype is torch.float32
        assert torch.nn.functional.cosine_similarity(ours.grad.flatten(), theirs.grad.flatten(), dim=0) > 0.99
    logp_N = rounded.logprobs(pieces)[0]
    assert logp_N.dtype is torch.float32
    assert torch.allclose(logp_N, exact.logprobs(pieces)[0], atol=0.1)


def test_a_checkpoint_exports_the_pushed_weights_and_restores_the_masters_bit_for_bit(tmp_path: Path) -> None:
    first = tiny_actor(tmp_path / "a", config_of())
    train(first, range(2))
    folder = save(first, tmp_path / "checkpoints")
    assert json.loads((folder / "model" / "config.json").read_text())["dtype"] == "bfloat16"
    exported: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert digest_of(dict(exported.named_parameters())) == pushed(first).digest
    second = tiny_actor(tmp_path / "b", config_of(), model=exported.float())
    state = checkpoint.load(folder)
    checkpoint.restore(state, policy=second.policy, optimizer=second.optimizer)
    second.version = state.version
    assert all(torch.equal(a, b) for a, b in zip(masters(first), masters(second), strict=True))
    train(first, range(2, 4))
    train(second, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(masters(first), masters(second), strict=True))


def test_float32_weights_are_kept_once(tmp_path: Path) -> None:
    folder = save(tiny_actor(tmp_path), tmp_path / "checkpoints")
    assert set(load_file(str(folder / "shards" / "shard-00001-of-00001.safetensors"))) == {"rng/0"}
