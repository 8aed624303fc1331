"""Writes a checkpoint of schema 1, as a rank 0 did that gathered everything."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from actors.learner.model.policy import Policy
from actors.learner.update.ppo import PPOActor
from actors.models.loading import load_tokenizer
from actors.models.scratch import write_scratch_folder
from areal_bus.config.sections import ScratchConfig
from areal_bus.storage import versioned_dirs


def write_whole(actor: PPOActor, run: Path) -> Path:
    """RUN/checkpoints/step-VERSION of an actor of one rank."""
    policy = actor.policy
    write_scratch_folder(run / "scratch", ScratchConfig())
    final = versioned_dirs.place(run / "checkpoints", actor.version)
    building = versioned_dirs.building(final)
    rounded = {name: parameter.detach().to(policy.dtype) for name, parameter in policy.parameters().items()}
    policy.model.save_pretrained(building / "model", state_dict=rounded)
    load_tokenizer(str(run / "scratch")).save_pretrained(building / "model")
    tensors = _state(policy, actor.optimizer, has_masters=policy.push_dtype is not torch.float32)
    save_file(tensors | {"rng": torch.get_rng_state()}, building / "optimizer.safetensors")
    if actor.critic is not None:
        critic = _state(actor.critic.model, actor.critic.optimizer, has_masters=True)
        save_file(critic, building / "critic.safetensors")
    (building / "state.json").write_text(json.dumps({"schema": 1, "version": actor.version}) + "\n")
    versioned_dirs.seal(building, final)
    return final


def _state(policy: Policy, optimizer: torch.optim.Optimizer, *, has_masters: bool) -> dict[str, Tensor]:
    named = policy.parameters().items()
    tensors = {f"{kind}/{name}": value for name, p in named for kind, value in optimizer.state.get(p, {}).items()}
    return tensors | ({f"master/{name}": p.detach().clone() for name, p in named} if has_masters else {})
