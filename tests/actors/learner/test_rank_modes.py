"""The learner computes the same whatever ranks, copies of the model, micro-batches and kept activations it has."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.learner.batch import build
from actors.learner.policy import whole
from actors.learner.rendezvous import LearnerRanks, meet, part
from areal_bus.weights.process_group import join_store
from tests.support.forked_ranks import run_ranks
from tests.support.learner_setup import random_shard, settings, tiny_actor, tiny_model

STEPS = 5
LOSSES = "losses"
MODES = ((1, 1), (2, 1), (4, 1), (4, 2))  # (ranks, copies): alone, FSDP, FSDP, HSDP
SETTINGS = {
    "one micro-batch": {"max_tokens_per_mb": 10_000},
    "gradient accumulation": {"max_tokens_per_mb": 24},
    "activation checkpointing": {"max_tokens_per_mb": 60, "gradient_checkpointing": True},
}


def steps_of_a_mode(index: int, endpoint: str, folder: str, size: int, replicas: int) -> None:
    """Five updates by each of SETTINGS; rank 0 writes losses and weights."""
    ranks = LearnerRanks()
    if size > 1:
        store = join_store(endpoint, 60.0)
        ranks = meet(store, index=index, size=size, interface="lo", device="cpu", timeout_s=60.0, replicas=replicas)
    for name, learner in SETTINGS.items():
        config = settings(actor={"lr": 1e-3, "adam_eps": 1e-4}, learner=learner)
        actor = tiny_actor(Path(folder) / f"{size}-{replicas}-{index}-{name}", config, ranks=ranks)
        losses = []
        for step in range(STEPS):
            shard = [item for item in random_shard(step, clock=step, n_groups=4) if item.group % size == index]
            batch = build(shard, step=step, clock=step, n_groups=4, eta=0)
            losses.append(actor.ppo_update(actor.compute_advantages_and_returns(batch))["loss"])
        held = {name: whole(parameter).detach().clone() for name, parameter in actor.policy.parameters().items()}
        if index == 0:
            save_file(held | {LOSSES: torch.tensor(losses)}, Path(folder) / f"{size}-{replicas}-{name}.safetensors")
    part()


@pytest.mark.slow
def test_ranks_copies_accumulation_and_checkpointed_activations_change_nothing(tmp_path: Path) -> None:
    """1, 2 and 4 gloo ranks: the same losses and weights to 1e-6 after five steps."""
    stages = [{"folder": str(tmp_path), "size": size, "replicas": replicas} for size, replicas in MODES]
    run_ranks(__name__, steps_of_a_mode.__name__, *stages)
    expected = load_file(tmp_path / "1-1-one micro-batch.safetensors")
    start = dict(tiny_model().named_parameters())
    assert all(float((expected[name] - start[name]).detach().abs().max()) > 1e-4 for name in start)
    for size, replicas in MODES:
        for name in SETTINGS:
            found = load_file(tmp_path / f"{size}-{replicas}-{name}.safetensors")
            for key, value in expected.items():
                assert torch.allclose(found[key], value, rtol=0, atol=1e-6), (size, replicas, name, key)
