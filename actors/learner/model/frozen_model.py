"""Models that the learner reads and never trains: the reference of the KL divergence and the teacher."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from actors.learner.model.adapters import Adapters
from actors.learner.model.chunked_head import HeadTask, Teacher, working
from actors.learner.model.policy import ModelSettings, PackedModel, Policy, model_settings
from actors.learner.model.remote_teacher import RemoteTeacher
from actors.models.loading import check_model_path, load_model
from actors.models.packed_row import SequencePiece
from areal_bus.config.algorithms import is_url, keeps_reference, uses_reference, uses_teacher
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError

REFERENCE = "reference"  # folder of a checkpoint that holds the reference model


class FrozenModel(PackedModel):
    """A model without gradient and optimizer, sharded as the policy is. Its parameters are in `dtype`."""

    def __init__(self, model: Any, **settings: Unpack[ModelSettings]) -> None:
        super().__init__(model, **settings)
        self.model.requires_grad_(False)

    def teach(self, pieces: Sequence[SequencePiece], *, beta: float, top_k: int | None) -> Teacher:
        """What a policy needs to diverge from this model at the wanted tokens; valid until `free`."""
        if self._head is None:
            raise ValueError("a teacher of whole distributions has a linear head: see check_chunks")
        if self.alone and len(pieces) > 1:
            parts = [self.teach([piece], beta=beta, top_k=top_k) for piece in pieces]
            return replace(parts[0], hidden_NH=torch.cat([part.hidden_NH for part in parts]))
        row, packing, split = self._rows(pieces)
        task = HeadTask(row.targets_N, 1.0, n_chunk=0)
        with torch.no_grad(), working(self.model, self._head, task) as soft_cap:
            hidden_NH = self._forward(row, packing).flatten(0, 1)
        n = len(hidden_NH) if split is not None else sum(len(piece.places_K) for piece in pieces)
        return Teacher(hidden_NH[:n], self._head.weight.detach(), self._head.bias, soft_cap, beta, top_k)

    def copy_from(self, policy: Policy) -> None:
        """Take the parameters of the policy, rounded to this model's dtype. Each rank copies its shard."""
        self.free()
        with torch.no_grad():
            for name, parameter in policy.parameters().items():
                _local(self.parameters()[name]).copy_(_local(parameter))

    def free(self) -> None:
        """Free the parameters that FSDP2 keeps gathered after a forward pass: those outside the decoder layers."""
        if isinstance(self.model, FSDPModule):
            self.model.reshard()


class PolicyBase:
    """The policy without its adapters, as a reference model that takes no memory. Not while a gradient is computed."""

    def __init__(self, policy: Policy, adapters: Adapters) -> None:
        self._policy, self._adapters = policy, adapters

    def logprobs(self, pieces: Sequence[SequencePiece]) -> tuple[Tensor, Tensor | None]:
        """As `PackedModel.logprobs`."""
        with self._adapters.off():
            return self._policy.logprobs(pieces)

    def idle_pass(self) -> None:
        """As `PackedModel.idle_pass`."""
        self._policy.idle_pass()


@dataclass(frozen=True, slots=True)
class FrozenModels:
    """The frozen models of a learner rank; None where the algorithm needs none."""

    reference: FrozenModel | PolicyBase | None = None
    teacher: FrozenModel | RemoteTeacher | None = None

    @property
    def by_stream(self) -> dict[str, FrozenModel | PolicyBase | RemoteTeacher]:
        """Name of a stream of the batch -> the model whose log-probs it has."""
        models = {"reference": self.reference, "teacher": self.teacher}
        return {name: model for name, model in models.items() if model is not None}


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def load_frozen_models(
    config: Config, policy: Policy, *, model: str, config_folder: Path, checkpoint: str = ""
) -> FrozenModels:
    """Load the algorithm's frozen models. `policy` is warm; `checkpoint`: the folder of its start point, "" for version
    0; `model`: the folder that the run starts from. Raises ConfigError.
    """
    reference: FrozenModel | PolicyBase | None = None
    teacher: FrozenModel | RemoteTeacher | None = None
    if uses_reference(config.actor):
        reference = _load_reference(config, policy, model, config_folder, checkpoint)
    if is_url(config.teacher.path):
        n_words = policy.model.config.get_text_config().vocab_size
        if config.actor.distill_beta is not None:
            policy.check_chunks("actor.distill_beta")
        teacher = RemoteTeacher(
            config.teacher.path, n_words=n_words, top_k=config.actor.distill_top_k, device=policy.device
        )
    elif uses_teacher(config.actor):
        path = check_model_path(config.teacher.path, config_folder, key="teacher.path")
        teacher = held = _load(config, policy, "teacher", path)
        for model_of in (policy, held) if config.actor.distill_beta is not None else ():
            model_of.check_chunks("actor.distill_beta")
    return FrozenModels(reference, teacher)


def _load_reference(
    config: Config, policy: Policy, model: str, config_folder: Path, checkpoint: str
) -> FrozenModel | PolicyBase:
    """From this run's checkpoints if they hold it, else reference.path, else the first model (adapters off, if any)."""
    if checkpoint and keeps_reference(config):
        return _load(config, policy, "reference", kept_in(checkpoint))
    if config.reference.path:
        path = check_model_path(config.reference.path, config_folder, key="reference.path")
        return _load(config, policy, "reference", path)
    if policy.adapters is not None:
        return PolicyBase(policy, policy.adapters)
    seed = config.run.seed if config.model.scratch is not None else None
    reference = _load(config, policy, "reference", model, random_seed=seed)
    if not checkpoint:
        reference.copy_from(policy)  # with its warm-up
    return reference


def kept_in(checkpoint: str) -> str:
    """The folder of the reference model within a checkpoint. Raises ConfigError if there is none."""
    folder = Path(checkpoint) / REFERENCE
    if not folder.is_dir():
        raise ConfigError(
            f"missing reference model in {checkpoint}: actor.kl_ctl or update_every was 0 when it was written; a run "
            "makes one by learner.warmup or reference.update_every: set them so again"
        )
    return str(folder)


def _load(config: Config, policy: Policy, what: str, folder: str, *, random_seed: int | None = None) -> FrozenModel:
    """Raises ConfigError if the model has fewer words than the policy."""
    device = str(policy.device) if policy.ranks.size == 1 else "cpu"  # sharding moves it layer by layer
    model = load_model(folder, config.model.dtype, device, random_seed=random_seed)
    n_words, wanted = model.config.vocab_size, policy.model.config.vocab_size
    if n_words < wanted:
        raise ConfigError(f"the {what} model must have every word of the policy: {folder} has {n_words} of {wanted}")
    settings = model_settings(config, policy.ranks, str(policy.device))
    return FrozenModel(model, **settings | {"gradient_checkpointing": False})
