"""Checkpoints, whole or not at all, without pickle; knows nothing of steps' figures, pushes or the head.

RUN/checkpoints/step-000010/
    model/                 a plain transformers folder: weights as they are pushed (in model.dtype), config, tokenizer
    optimizer.safetensors  AdamW's state by parameter name, float32 parameters where the model's are rounded, RNG state
    state.json             version, configuration of the optimizer
    manifest.json          size and SHA-256 of every other file
A folder is written under a temporary name, synced, then renamed, and renamed again before it is removed: what has its
final name is complete. Names that begin with a dot are on their way: ".tmp" is removed by the next save, ".old" stands
aside while another takes its name and is put back if that did not happen. A run's folder has one writer.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.training.policy import Policy, whole
from areal_bus.errors import CheckpointError

SCHEMA = 1
MANIFEST = "manifest.json"
MASTER = "master"
BLOCK = 1 << 20


@dataclass(frozen=True, slots=True)
class State:
    """What a checkpoint holds beside the weights, on the host and whole."""

    version: int
    tensors: Mapping[str, Tensor]  # "KIND/PARAMETER": the optimizer's, or of kind "master"; and "rng"


def save(
    folder: Path, *, policy: Policy, optimizer: torch.optim.Optimizer, version: int, tokenizer: Any, keep: int
) -> Path:
    """Write RUN/checkpoints/step-VERSION (`folder` is RUN/checkpoints) and remove all but the newest `keep`.

    A collective when the policy is sharded: rank 0 writes, the others help to gather and return the same path.
    """
    final = folder / f"step-{version:06d}"
    weights = gather(policy)
    tensors = _optimizer_tensors(policy, optimizer)
    if policy.ranks.index == 0:
        _tidy(folder)
        building = _temporary(final)
        building.mkdir(parents=True)
        if policy.dtype is not torch.float32:
            tensors |= {f"{MASTER}/{name}": weights[name].contiguous() for name in policy.parameters()}
        write_model(building / "model", policy, weights, tokenizer)
        save_file(tensors | {"rng": torch.get_rng_state()}, str(building / "optimizer.safetensors"))
        (building / "state.json").write_text(json.dumps({"schema": SCHEMA, "version": version}) + "\n")
        _seal(building, final)
        _prune(folder, keep, newest=final)
    policy.ranks.wait()
    return final


def gather(policy: Policy) -> dict[str, Tensor]:
    """The model's whole state on the host of rank 0 (empty elsewhere), tied weights once; a collective when sharded."""
    state: dict[str, Tensor] = {}
    tied = {name for name, _ in policy.model.named_parameters(remove_duplicate=False)} - set(policy.parameters())
    for name, tensor in policy.model.state_dict().items():
        if name in tied:
            continue
        full = whole(tensor).detach()
        if policy.ranks.index == 0:
            state[name] = full.cpu()
    return state


def write_model(folder: Path, policy: Policy, weights: Mapping[str, Tensor], tokenizer: Any) -> None:
    """A folder that plain transformers loads, the parameters in the policy's dtype."""
    rounded = {name: weights[name].to(policy.dtype) for name in policy.parameters()}
    policy.model.save_pretrained(folder, state_dict={**weights, **rounded})
    tokenizer.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # transformers names the type of the live parameters
    config["dtype"] = str(policy.dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def verify(folder: Path) -> None:
    """Raises CheckpointError unless every file of the manifest is there with its size and hash."""
    try:
        files: dict[str, dict[str, Any]] = json.loads((folder / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"a checkpoint has a readable {MANIFEST}: {folder}: {error}") from error
    for name, entry in files.items():
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"every file of the manifest is there: {path} is missing")
        if path.stat().st_size != entry["bytes"] or _sha256(path) != entry["sha256"]:
            raise CheckpointError(f"every file is what the manifest says: {path} differs in size or SHA-256")


def load(folder: Path) -> State:
    """The state beside the weights, after `verify`; the weights are the transformers folder `folder / "model"`."""
    verify(folder)
    about = json.loads((folder / "state.json").read_text())
    if about.get("schema") != SCHEMA:
        raise CheckpointError(f"a checkpoint has schema {SCHEMA}: {folder} has {about.get('schema')}")
    return State(version=about["version"], tensors=load_file(str(folder / "optimizer.safetensors")))


def restore(state: State, *, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Put the optimizer's, the generator's and any rounded parameters' state back, sharded as the parameters are.

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


def link(path: Path, target: Path) -> None:
    """Make `path` a symbolic link to `target`, in one step even when it exists."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(os.path.relpath(target, path.parent))
    fresh.replace(path)


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, parameter in policy.parameters().items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            full = whole(value).detach()
            if policy.ranks.index == 0:
                tensors[f"{kind}/{name}"] = full.cpu().contiguous()
    return tensors


def _seal(building: Path, final: Path) -> None:
    """Manifest, sync, rename: after it `final` is complete, before it is not there (or is what it was)."""
    paths = sorted(path for path in building.rglob("*") if path.is_file())
    files = {str(path.relative_to(building)): {"bytes": path.stat().st_size, "sha256": _sha256(path)} for path in paths}
    (building / MANIFEST).write_text(json.dumps({"schema": SCHEMA, "files": files}, indent=1) + "\n")
    for path in [*paths, building / MANIFEST, building / "model", building]:
        _sync(path)
    aside = final.with_name(f".{final.name}.old")
    if final.exists():
        final.rename(aside)
    building.rename(final)
    _sync(final.parent)
    if aside.exists():
        shutil.rmtree(aside)


def _prune(folder: Path, keep: int, *, newest: Path) -> None:
    by_version = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    others = [path for path in by_version if path != newest]  # a run that was set back has higher ones
    for old in others[: max(len(others) - keep + 1, 0)]:
        leaving = _temporary(old)
        old.rename(leaving)
        shutil.rmtree(leaving)


def _tidy(folder: Path) -> None:
    """Put right what a writer that died has left."""
    for aside in folder.glob(".step-*.old"):
        final = folder / aside.name.removeprefix(".").removesuffix(".old")
        if final.exists():
            shutil.rmtree(aside)
        else:
            aside.rename(final)
    for left in folder.glob(".step-*.tmp"):
        if not _is_another(int(left.name.split(".")[-2])):
            shutil.rmtree(left)


def _temporary(final: Path) -> Path:
    return final.with_name(f".{final.name}.{os.getpid()}.tmp")


def _is_another(pid: int) -> bool:
    """Whether this is a process beside this one that lives."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as somebody else's
        return True
    return True


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
