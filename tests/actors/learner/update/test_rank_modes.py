"""The learner computes the same whatever ranks, copies of the model, micro-batches and kept activations it has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from actors.learner.batching import build
from actors.learner.link.rendezvous import part
from actors.learner.model.policy import whole
from tests.support.forked_ranks import met, run_ranks
from tests.support.learner_setup import random_shard, settings, tiny_actor, tiny_model

STEPS = 5
LOSSES = "losses"
MODES = (  # (ranks, copies, ranks that share each sequence)
    (1, 1, 1),
    (2, 1, 1),  # FSDP
    (4, 1, 1),
    (4, 2, 1),  # HSDP
    (2, 1, 2),  # context parallel
    (4, 1, 2),
    (4, 2, 2),
)
WHOLE, ADAPTERS = "one micro-batch", "adapters"
LORA: dict[str, Any] = {"lora": {"rank": 4}, "kl_ctl": 0.3}
SPARING = {"max_tokens_per_mb": 60, "gradient_checkpointing": True}
COMPILED = SPARING | {"compile": True}
FEW_MIB = 23 * 4 * 9 / 2**20  # a logits matrix of nine tokens
SETTINGS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any], float]
] = {  # what it equals; actor, learner, MiB of logits
    WHOLE: (WHOLE, {}, {"max_tokens_per_mb": 10_000}, 512.0),
    "gradient accumulation": (WHOLE, {}, {"max_tokens_per_mb": 24}, 512.0),
    "activation checkpointing": (WHOLE, {}, SPARING, 512.0),
    "compiled layers": (WHOLE, {}, COMPILED, 512.0),
    "head in chunks": (WHOLE, {}, {"max_tokens_per_mb": 60}, FEW_MIB),
    ADAPTERS: (ADAPTERS, LORA, {"max_tokens_per_mb": 10_000}, 512.0),
    "adapters, all of it": (ADAPTERS, LORA, COMPILED, FEW_MIB),
}


def steps_of_a_mode(index: int, endpoint: str, folder: str, size: int, replicas: int, width: int) -> None:
    """Five updates by each of SETTINGS; rank 0 writes losses and weights."""
    ranks = met(index, endpoint, size, replicas, width)
    for name, (_, more, learner, logits_mib) in SETTINGS.items():
        config = settings(actor={"lr": 1e-3, "adam_eps": 1e-4, **more}, learner=learner)
        actor = tiny_actor(Path(folder) / f"{size}-{replicas}-{width}-{index}-{name}", config, ranks=ranks)
        actor.policy._max_logits_mib = logits_mib
        losses = []
        for step in range(STEPS):
            drawn = random_shard(step, clock=step, n_groups=4)
            shard = [item for item in drawn if item.group % ranks.n_shares == ranks.share]
            batch = build(shard, step=step, clock=step, n_groups=4, eta=0)
            losses.append(actor.ppo_update(actor.compute_advantages_and_returns(batch))["loss"])
        held = {name: whole(parameter).detach().clone() for name, parameter in actor.policy.parameters().items()}
        if index == 0:
            save_file(held | {LOSSES: torch.tensor(losses)}, file_of(Path(folder), name, size, replicas, width))
    part()


def file_of(folder: Path, name: str, size: int, replicas: int, width: int) -> Path:
    return folder / f"{size}-{replicas}-{width}-{name}.safetensors"


@pytest.mark.soak
def test_ranks_copies_shared_sequences_accumulation_and_checkpointed_activations_change_nothing(tmp_path: Path) -> None:
    """1, 2 and 4 gloo ranks: the same losses and weights to 1e-6 after five steps, of all weights and of adapters."""
    stages = [
        {"folder": str(tmp_path), "size": size, "replicas": replicas, "width": width} for size, replicas, width in MODES
    ]
    run_ranks(__name__, steps_of_a_mode.__name__, *stages)
    alone = {name: load_file(file_of(tmp_path, name, *MODES[0])) for name in (WHOLE, ADAPTERS)}
    start = dict(tiny_model().named_parameters())
    assert all(float((alone[WHOLE][name] - start[name]).detach().abs().max()) > 1e-4 for name in start)
    assert all(float(value.abs().max()) > 1e-4 for name, value in alone[ADAPTERS].items() if "lora_B" in name)
    gaps = {}
    for mode in MODES:
        for name, (same, *_) in SETTINGS.items():
            found = load_file(file_of(tmp_path, name, *mode))
            assert found.keys() == alone[same].keys()
            gaps[mode, name] = max(float((found[key] - value).abs().max()) for key, value in alone[same].items())
    print({key: f"{gap:.1e}" for key, gap in gaps.items()})
    assert {key: gap for key, gap in gaps.items() if gap > 1e-6} == {}
