"""Writes and reads learner checkpoints, without pickle.

RUN/checkpoints/step-000010/
    model/         a plain transformers folder: weights as they are pushed (in model.dtype), one file a rank, config and
                   tokenizer; with actor.lora the adapters in peft's format (float32) and the tokenizer
    reference/     the same for the reference model, where the run has made it
    shards/        one file a rank, in the safetensors form of torch's distributed checkpoint: AdamW's state, float32
                   parameters where the model's are rounded, the same of a critic, running statistics of rewards and
                   returns, and each rank's RNG state
    state.json     schema, version, number of ranks
    manifest.json  size and SHA-256 of every other file
`areal_bus/storage/versioned_dirs.py` writes such a folder atomically. Checkpoints of schema 1, with
optimizer.safetensors and critic.safetensors instead of shards/, are read as well.
"""

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, distribute_tensor

from actors.learner.algorithms.running import empty
from actors.learner.checkpoint import shards
from actors.learner.checkpoint.model_part import ModelPart, stage_model, write_index
from actors.learner.checkpoint.shards import RNG, Files, Meeting, RankReport, Shard, ShardReader, conclude, stage_shard
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.critic import Critic
from actors.learner.model.frozen_model import REFERENCE, FrozenModel
from actors.learner.model.policy import Policy
from actors.learner.update.optimizers import kept, key_of, plain
from areal_bus.errors import CheckpointError
from areal_bus.storage import versioned_dirs
from areal_bus.storage.versioned_dirs import link, verify

__all__ = ["PendingCheckpoint", "TrainingState", "link", "load", "read", "restore", "save", "stage", "verify"]

SCHEMA = 2
WHOLE = 1  # schema of checkpoints that rank 0 wrote alone
MASTER = "master"
POLICY, CRITIC, STATISTICS = "policy/", "critic/", "running/"  # prefixes in the shards
WHOLE_OPTIMIZER, WHOLE_CRITIC = "optimizer.safetensors", "critic.safetensors"  # of schema 1
OS_ERROR = "(os error "  # prefix of operating system errors in Rust libraries

_numbers = itertools.count(1)  # of the checkpoints of this process


@dataclass(frozen=True, slots=True)
class TrainingState:
    """State of a checkpoint besides the weights of the model."""

    version: int
    folder: Path
    tensors: Mapping[str, Tensor] | None = None  # of schema 1: "KIND/PARAMETER", "rng"; full, on the host


@dataclass(slots=True)
class PendingCheckpoint:
    """A version of the training state on each rank's host, to be written, beside training if it was copied."""

    final: Path
    version: int
    number: int
    ranks: LearnerRanks
    building: Path
    shard: Shard
    models: list[ModelPart]
    tokenizer: Any
    prune: Callable[[], None] = field(repr=False)

    def write(self) -> Path:
        """Write this rank's part; returns the folder once all ranks have. On any thread; no collective.

        Raises CheckpointError, on every rank, when the disk of one is full or broken; what was there stays.
        """
        files: dict[str, Any] = {}
        broken: Exception | None = None
        try:
            self._write_files(files)
        except Exception as error:  # noqa: BLE001 (raised below: the other ranks wait for the report)
            broken = error
        report = RankReport(files, "" if broken is None else str(broken) or repr(broken))
        meeting = Meeting(self.ranks.index, self.ranks.size, self.number, self.ranks.store)
        try:
            conclude(meeting, report, self._seal, lambda: versioned_dirs.give_up(self.final))
        except CheckpointError as error:
            if broken is None or _is_of_the_disk(broken):
                raise _refusal(self.final, error) from (broken or error)
        if broken is not None:
            raise broken
        if self.ranks.index == 0:
            with contextlib.suppress(OSError):  # a failed removal is retried with the next checkpoint
                self.prune()
        return self.final

    def _write_files(self, files: dict[str, Any]) -> None:
        if not self.building.is_dir():
            raise OSError(
                f"missing folder {self.building} on this host: run.folder must be on a file system that the hosts of "
                "all learners share"
            )
        files.update(self.shard.write(self.building))
        for model in self.models:
            files.update(model.write(self.building, self.tokenizer))

    def _seal(self, files: Files) -> None:
        """Runs on rank 0, after all ranks have written."""
        state = {
            "schema": SCHEMA, "version": self.version, "ranks": self.ranks.size, "replicas": self.ranks.replicas
        }  # fmt: skip
        known = {name: (record.n_bytes, record.sha256) for name, record in files.items()}
        try:
            for model in self.models:
                write_index(self.building / model.folder)
            (self.building / "state.json").write_text(json.dumps(state) + "\n", encoding="utf-8")
            versioned_dirs.seal(self.building, self.final, known)
        except Exception as error:
            if not _is_of_the_disk(error):
                raise
            raise CheckpointError(str(error)) from error


def stage(
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
    copies: bool = True,
) -> PendingCheckpoint:
    """Prepare RUN/checkpoints/step-VERSION (`folder` is RUN/checkpoints): each rank takes its shard to the host.

    `write` then writes it and removes old ones: the newest `keep` stay, the newest `keep` of those that count, and the
    best. A collective when the policy is sharded. Without `copies` the state must not change before `write` has
    returned. Raises CheckpointError, on every rank, when rank 0 cannot make the folder.
    """
    final, ranks = versioned_dirs.place(folder, version), policy.ranks
    parts = {"model": policy} if reference is None else {"model": policy, REFERENCE: reference}
    building, number = _begin(final, ranks, [shards.FOLDER, *parts])
    state = training_state(policy, optimizer, critic, has_masters=policy.push_dtype is not torch.float32)
    return PendingCheckpoint(
        final=final,
        version=version,
        number=number,
        ranks=ranks,
        building=building,
        shard=stage_shard(state, index=ranks.index, size=ranks.size, replicas=ranks.replicas, copies=copies),
        models=[stage_model(name, model, copies=copies) for name, model in parts.items()],
        tokenizer=tokenizer,
        prune=lambda: versioned_dirs.prune(folder, keep, newest=final, counts=counts, is_best=is_best),
    )


def save(folder: Path, **settings: Any) -> Path:
    """`stage` and `write` at once, without a copy. A collective when the policy is sharded."""
    return stage(folder, **settings, copies=False).write()


def _begin(final: Path, ranks: LearnerRanks, folders: list[str]) -> tuple[Path, int]:
    """The temporary folder, made by rank 0, and the number of the checkpoint. A collective."""
    broken: OSError | None = None
    number = pid = 0
    if ranks.index == 0:
        number, pid = next(_numbers), os.getpid()
        try:
            building = versioned_dirs.building(final)
            for name in folders:
                (building / name).mkdir()
        except OSError as error:
            broken = error
            versioned_dirs.give_up(final)
    n_broken, number_, pid_ = ranks.sum([float(broken is not None), float(number), float(pid)])
    if n_broken:
        raise _refusal(final, broken or "rank 0 says why") from broken
    return versioned_dirs.temporary_of(final, int(pid_)), int(number_)


def _refusal(final: Path, why: object) -> CheckpointError:
    return CheckpointError(f"cannot write the checkpoint {final} ({why})")


def _is_of_the_disk(error: Exception) -> bool:
    """Whether it is a disk error. Rust libraries have no class of their own for it."""
    return isinstance(error, OSError | SafetensorError) or OS_ERROR in str(error)


def training_state(
    policy: Policy, optimizer: torch.optim.Optimizer, critic: Critic | None, *, has_masters: bool
) -> dict[str, Tensor]:
    """Live tensors of policy, critic and random numbers, by key; with `has_masters` the policy's parameters."""
    state = _tensors_of(policy, optimizer, POLICY, has_masters=has_masters)
    if critic is not None:
        state |= _tensors_of(critic.model, critic.optimizer, CRITIC, has_masters=True)
    state |= {f"{STATISTICS}{name}": values for name, values in policy.running.items() if values.any()}
    state[f"{RNG}{policy.ranks.index}"] = torch.get_rng_state()
    return state


def _tensors_of(
    model: Policy, optimizer: torch.optim.Optimizer, prefix: str, *, has_masters: bool
) -> dict[str, Tensor]:
    """Live tensors by key: the optimizer's state and, with `has_masters`, the float32 parameters."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.parameters().items():
        for kind, value in optimizer.state.get(parameter, {}).items():
            if value is not None:
                tensors[f"{prefix}{key_of(kind, value)}/{name}"] = plain(value)
        if has_masters:
            tensors[f"{prefix}{MASTER}/{name}"] = parameter.detach()
    return tensors


def load(folder: Path) -> TrainingState:
    """As `read`, after `verify`."""
    verify(folder)
    return read(folder)


def read(folder: Path) -> TrainingState:
    """The state besides the weights, which are in `folder / "model"`."""
    version, schema = _about(folder)
    if schema == WHOLE:
        return TrainingState(version, folder, load_file(str(folder / WHOLE_OPTIMIZER)))
    return TrainingState(version, folder)


def version_of(folder: Path) -> int:
    """The version of the checkpoint. Raises CheckpointError if its name or schema differs."""
    return _about(folder)[0]


def _about(folder: Path) -> tuple[int, int]:
    """(version, schema)."""
    about = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    schema = about.get("schema")
    if schema not in (WHOLE, SCHEMA):
        raise CheckpointError(
            f"a checkpoint has schema {WHOLE} or {SCHEMA}: {folder} has {schema}; a newer release wrote it, which can "
            f'resume it, or start a new run from its model (model.path = "{folder / "model"}")'
        )
    version = int(about["version"])
    if versioned_dirs.place(folder.parent, version).name != folder.name:
        raise CheckpointError(
            f"version mismatch: {folder} holds version {version}; a checkpoint has the name of its version"
        )
    return version, schema


def restore(state: TrainingState, *, policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Restore optimizer, RNG and rounded parameters of any number of ranks. CheckpointError: state of another model."""
    if state.tensors is not None:
        _restore_whole(state.tensors, policy, optimizer)
        return
    restore_state(ShardReader(state.folder), policy=policy, optimizer=optimizer, critic=None)


class StateReader(Protocol):
    """The training state of a checkpoint, or of a copy in memory."""

    def forms(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Key without the prefix -> shape and dtype of the whole tensor."""

    def load(self, targets: Mapping[str, Tensor]) -> None:
        """Fill the tensors."""


def restore_state(
    reader: StateReader, *, policy: Policy, optimizer: torch.optim.Optimizer, critic: Critic | None
) -> None:
    """Restore optimizer, RNG, the parameters that it has, and a critic. CheckpointError: state of another model."""
    _restore_shards(reader, POLICY, policy, optimizer)
    if critic is not None:
        _restore_shards(reader, CRITIC, critic.model, critic.optimizer)
    policy.running |= {name: empty() for name in policy.running}
    reader.load({f"{STATISTICS}{name}": policy.running[name] for name in reader.forms(STATISTICS)})
    saved, index = reader.forms(RNG), policy.ranks.index
    rng = torch.empty(next(iter(saved.values())).size, dtype=torch.uint8)
    reader.load({f"{RNG}{index if str(index) in saved else 0}": rng})
    torch.set_rng_state(rng)


def _restore_shards(reader: StateReader, prefix: str, model: Policy, optimizer: torch.optim.Optimizer) -> None:
    parameters, forms = model.parameters(), reader.forms(prefix)
    _check_names({key.split("/", 1)[1] for key in forms}, parameters)
    _check_shapes(forms, parameters)
    targets: dict[str, Tensor] = {}
    for key, form in forms.items():
        kind, name = key.split("/", 1)
        parameter = parameters[name]
        if kind == MASTER:
            targets[prefix + key] = parameter.detach()
            continue
        is_like_it = form.size == parameter.shape  # else the number of its steps
        dtype = form.properties.dtype  # a user's optimizer may keep states in another one than the parameter's
        value = torch.zeros_like(parameter.detach(), dtype=dtype) if is_like_it else torch.zeros((), dtype=dtype)
        targets[prefix + key] = optimizer.state[parameter][kind] = value
    reader.load(targets)
    for parameter in parameters.values():
        if held := optimizer.state.get(parameter):
            optimizer.state[parameter] = dict(kept(optimizer, parameter, *state) for state in held.items())


def _check_shapes(forms: Mapping[str, TensorStorageMetadata], parameters: Mapping[str, Tensor]) -> None:
    for key, form in forms.items():
        name = key.split("/", 1)[1]
        if form.size and form.size != parameters[name].shape:
            raise CheckpointError(
                f"a checkpoint is of the model that it is restored into: {name!r} is {list(form.size)} there and "
                f"{list(parameters[name].shape)} here"
            )


def _check_names(saved: set[str], parameters: Mapping[str, Any]) -> None:
    if saved and saved != set(parameters):
        odd = sorted(saved ^ set(parameters))[0]
        raise CheckpointError(
            f"optimizer state and parameters have the same names: {odd!r} is in one of them only; the checkpoint is of "
            "another model"
        )


def _restore_whole(tensors: Mapping[str, Tensor], policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    """Of schema 1: every rank has read all tensors and takes its shards."""
    parameters = policy.parameters()
    _check_names({key.split("/", 1)[-1] for key in tensors} - {"rng"}, parameters)
    for key, tensor in tensors.items():
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
    if (folder / WHOLE_CRITIC).is_file():
        _restore_whole(load_file(str(folder / WHOLE_CRITIC)), critic.model, critic.optimizer)
        return
    reader = ShardReader(folder) if _about(folder)[1] == SCHEMA else None
    if reader is None or not reader.forms(CRITIC):
        raise CheckpointError(
            f'missing critic in {folder}, which actor.advantage = "gae" needs: start a new run with its model '
            f"(model.path = {folder}/model)"
        )
    _restore_shards(reader, CRITIC, critic.model, critic.optimizer)
