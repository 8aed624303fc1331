"""Writes and reads learner checkpoints, without pickle.

RUN/checkpoints/step-000010/
    model/                 a plain transformers folder: weights as they are pushed (in model.dtype), config, tokenizer;
                           with actor.lora the adapters in peft's format (float32), and the tokenizer
    reference/             the same for the reference model, where the run has made it
    critic.safetensors     with a critic: its float32 weights and AdamW's state by parameter name
    optimizer.safetensors  AdamW's state by parameter name, float32 parameters where the model's are rounded, RNG state
    state.json             version, configuration of the optimizer
    manifest.json          size and SHA-256 of every other file
`areal_bus/storage/versioned_dirs.py` writes such a folder atomically.
"""

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.learner.critic import Critic
from actors.learner.frozen_model import REFERENCE, FrozenModel
from actors.learner.policy import PackedModel, Policy, whole
from areal_bus.errors import CheckpointError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.versioned_dirs import SCHEMA, link, verify

__all__ = ["TrainingState", "gather", "link", "load", "read", "restore", "save", "verify", "version_of", "write_model"]

MASTER = "master"
CRITIC = "critic.safetensors"
OS_ERROR = "(os error "  # prefix of operating system errors in Rust libraries


@dataclass(frozen=True, slots=True)
class TrainingState:
    """State of a checkpoint besides the weights; full tensors on the host."""

    version: int
    tensors: Mapping[str, Tensor]  # "KIND/PARAMETER": the optimizer's, or of kind "master"; and "rng"


def save(
    folder: Path,
    *,
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    version: int,
    tokenizer: Any,
    keep: int,
    counts: Callable[[int], bool] = lambda version: True,
    is_best: Callable[[int], bool] = lambda version: False,
    reference: FrozenModel | None = None,
    critic: Critic | None = None,
) -> Path:
    """Write RUN/checkpoints/step-VERSION (`folder` is RUN/checkpoints) and remove old ones.

    The newest `keep` stay, the newest `keep` of those that count, and the best. A collective when the policy is
    sharded: rank 0 writes, the others help to gather and return the same path. Raises CheckpointError, on every rank,
    when the disk does not take it (full, or broken): then all that was there before still is.
    """
    final = versioned_dirs.place(folder, version)
    weights = gather(policy)
    models: list[tuple[str, PackedModel, Mapping[str, Tensor]]] = [("model", policy, weights)]
    if reference is not None:
        models.append((REFERENCE, reference, gather(reference)))
    tensors = _optimizer_tensors(policy, optimizer)
    of_critic = None if critic is None else _critic_tensors(critic)
    broken: Exception | None = None
    if policy.ranks.index == 0:
        if policy.push_dtype is not torch.float32:
            tensors |= {f"{MASTER}/{name}": weights[name].contiguous() for name in policy.parameters()}
        tensors["rng"] = torch.get_rng_state()
        broken = _write(final, models, tensors, of_critic, version=version, tokenizer=tokenizer)
        if broken is None:
            with contextlib.suppress(OSError):  # a failed removal is retried with the next checkpoint
                versioned_dirs.prune(folder, keep, newest=final, counts=counts, is_best=is_best)
    (n_broken,) = policy.ranks.sum([float(broken is not None)])
    if n_broken:
        why = broken or "rank 0 says why"
        raise CheckpointError(f"a checkpoint is written whole or not at all: {final} could not be ({why})") from broken
    return final


def _write(
    final: Path,
    models: Sequence[tuple[str, PackedModel, Mapping[str, Tensor]]],
    tensors: dict[str, Tensor],
    of_critic: dict[str, Tensor] | None,
    *,
    version: int,
    tokenizer: Any,
) -> Exception | None:
    """Returns the disk error, or None. After an error nothing remains on disk."""
    try:
        building = versioned_dirs.building(final)
        for name, model, weights in models:
            write_model(building / name, model, weights, tokenizer)
        save_file(tensors, str(building / "optimizer.safetensors"))
        if of_critic is not None:
            save_file(of_critic, str(building / CRITIC))
        (building / "state.json").write_text(json.dumps({"schema": SCHEMA, "version": version}) + "\n")
        versioned_dirs.seal(building, final)
    except Exception as error:
        versioned_dirs.give_up(final)
        if not _is_of_the_disk(error):
            raise
        return error
    return None


def _is_of_the_disk(error: Exception) -> bool:
    """Whether it is a disk error. Rust libraries have no class of their own for it."""
    return isinstance(error, OSError | SafetensorError) or OS_ERROR in str(error)


def gather(policy: PackedModel) -> dict[str, Tensor]:
    """The full state of the model on rank 0 (empty elsewhere); tied weights once; a collective when sharded.

    Of a policy with adapters, the adapters.
    """
    state: dict[str, Tensor] = {}
    if has_adapters(policy):
        full_adapters = {name: whole(parameter).detach() for name, parameter in policy.parameters().items()}
        return {name: full.cpu() for name, full in full_adapters.items()} if policy.ranks.index == 0 else {}
    tied = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)} - set(policy.parameters())
    for name, tensor in policy.model.state_dict().items():
        if name in tied:
            continue
        full = whole(tensor).detach()
        if policy.ranks.index == 0:
            state[name] = full.cpu()
    return state


def has_adapters(model: PackedModel) -> bool:
    return isinstance(model, Policy) and model.adapters is not None


def write_model(folder: Path, policy: PackedModel, weights: Mapping[str, Tensor], tokenizer: Any) -> None:
    """Write a transformers folder with the parameters in the dtype of the policy, or adapters in peft's format."""
    if isinstance(policy, Policy) and policy.adapters is not None:
        policy.adapters.write(folder, weights)
        tokenizer.save_pretrained(folder)
        return
    rounded = {name: weights[name].to(policy.dtype) for name in policy.parameters()}
    policy.model.save_pretrained(folder, state_dict={**weights, **rounded})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # transformers writes the dtype of the live parameters
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def load(folder: Path) -> TrainingState:
    """As `read`, after `verify`."""
    verify(folder)
    return read(folder)


def read(folder: Path) -> TrainingState:
    """Read the state besides the weights, which are in `folder / "model"`."""
    return TrainingState(version=version_of(folder), tensors=load_file(str(folder / "optimizer.safetensors")))


def version_of(folder: Path) -> int:
    """The version of the checkpoint. Raises CheckpointError if its name or schema differs."""
    about = json.loads((folder / "state.json").read_text())
    if about.get("schema") != SCHEMA:
        raise CheckpointError(f"a checkpoint has schema {SCHEMA}: {folder} has {about.get('schema')}")
    version = int(about["version"])
    if versioned_dirs.place(folder.parent, version).name != folder.name:
        raise CheckpointError(f"a checkpoint has the name of its version: {folder} holds version {version}")
    return version


def restore(state: TrainingState, *, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore optimizer, RNG and rounded parameters, sharded as the parameters are.

    Raises CheckpointError when the state belongs to other parameters.
    """
    names = {name for name in (key.split("/", 1)[-1] for key in state.tensors) if name != "rng"}
    parameters = policy.parameters()
    if names and names != set(parameters):
        odd = sorted(names ^ set(parameters))[0]
        raise CheckpointError(f"optimizer state and parameters have the same names: {odd!r} is in one of them only")
    for key, tensor in state.tensors.items():
        if key == "rng":
            torch.set_rng_state(tensor)
            continue
        kind, name = key.split("/", 1)
        parameter = parameters[name]
        if isinstance(parameter, DTensor) and tensor.shape == parameter.shape:
            value: Tensor = distribute_tensor(tensor.to(policy.device), parameter.device_mesh, parameter.placements)
        else:
            value = tensor if tensor.dim() == 0 else tensor.to(policy.device)
        if kind == MASTER:
            with torch.no_grad():
                parameter.copy_(value)
        else:
            optimizer.state[parameter][kind] = value


def restore_critic(folder: Path, critic: Critic) -> None:
    """Restore weights and optimizer of a critic. Raises CheckpointError for a checkpoint without one."""
    file = folder / CRITIC
    if not file.is_file():
        raise CheckpointError(
            f'actor.advantage = "gae" needs a checkpoint with a critic: {folder} has none; start a new run '
            f"with its model (model.path = {folder}/model)"
        )
    state = TrainingState(version_of(folder), load_file(str(file)))
    restore(state, policy=critic.model, optimizer=critic.optimizer)


def _critic_tensors(critic: Critic) -> dict[str, Tensor]:
    """Float32 weights (as "master") and optimizer state on rank 0; a collective when sharded."""
    tensors = _optimizer_tensors(critic.model, critic.optimizer)
    for name, parameter in critic.model.parameters().items():
        full = whole(parameter).detach()
        if critic.model.ranks.index == 0:
            tensors[f"{MASTER}/{name}"] = full.cpu().contiguous()
    return tensors


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.parameters().items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            full = whole(value).detach()
            if policy.ranks.index == 0:
                tensors[f"{kind}/{name}"] = full.cpu().contiguous()
    return tensors
