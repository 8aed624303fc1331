"""The models that clients train: forward and backward passes, optimizer steps, saved states. Without processes or HTTP.

All models have one base. Adapters of several clients share its weights; a model that is trained whole has its own. N
positions (times targets) of the data of one pass.
"""

import copy
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from actors.learner.batching import pack
from actors.learner.link.rendezvous import LearnerRanks
from actors.learner.model.adapters import Adapters
from actors.learner.model.policy import Policy
from actors.models.loading import load_base, load_model, load_tokenizer
from actors.models.packed_row import SequencePiece
from areal_bus.config.learner import LoraConfig
from areal_bus.config.sections import Config
from areal_bus.errors import CheckpointError, ConfigError
from areal_bus.storage.versioned_dirs import temporary_folder
from areal_bus.weights.snapshot import digest_of
from areal_serve.losses import Config as LossConfig
from areal_serve.losses import Inputs, Loss, find_loss
from areal_serve.rejection import Rejected
from areal_serve.wire import Datum, PassRequest

ALPHA = 32.0  # of every adapter, as the API has it
META, OPTIMIZER, WEIGHTS = "meta.json", "optimizer.safetensors", "model.safetensors"
CONFIG = "config.json"  # of transformers
GRADIENTS = "gradients.safetensors"  # added up since the last step; in snapshots of the server alone
MOMENTS = ("exp_avg", "exp_avg_sq", "step")  # AdamW's state of a parameter
ADAM = {"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0, "grad_clip_norm": 0.0}


@dataclass(slots=True)
class Model:
    """What one client trains."""

    policy: Policy
    optimizer: torch.optim.AdamW
    lora: Mapping[str, Any] | None  # rank, seed and parts of its adapters; None: the whole model
    n_steps: int = 0


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a pass."""

    logps: list[np.ndarray[Any, Any]]  # of each datum, in the shape of its targets
    metrics: dict[str, float]


class Trainer:
    """All models of a server, by id."""

    def __init__(self, config: Config, folder: str, *, device: str, max_tokens: int) -> None:
        """`folder`: of the base model. `max_tokens`: longest datum."""
        self._config, self._folder, self._device, self._max_tokens = config, folder, device, max_tokens
        self._base: Any = load_base(config, folder, device)
        self._names = {id(parameter): parameter for parameter in [*self._base.parameters(), *self._base.buffers()]}
        self.models: dict[str, Model] = {}

    def create(
        self, model_id: str, lora: Mapping[str, Any] | None, folder: Path | None = None, *, optimizer: bool = False
    ) -> None:
        """A new model, or one that begins as a saved state. Raises Rejected for adapters that it cannot have."""
        try:
            policy = self._whole() if lora is None else self._adapted(model_id, lora)
        except ConfigError as error:
            raise Rejected(str(error)) from error
        adamw = torch.optim.AdamW(list(policy.parameters().values()), lr=0.0)
        self.models[model_id] = Model(policy, adamw, lora)
        try:
            if folder is not None:
                self.load(model_id, folder, optimizer=optimizer)
        except Rejected:
            self.drop(model_id)
            raise

    def _whole(self) -> Policy:
        seed = self._config.run.seed if self._config.model.scratch is not None else None
        model = load_model(self._folder, "float32", self._device, random_seed=seed)
        return self._policy(model.requires_grad_(True), None)

    def _adapted(self, model_id: str, lora: Mapping[str, Any]) -> Policy:
        model = copy.deepcopy(self._base, dict(self._names))  # modules of its own around the weights of the base
        settings = LoraConfig(rank=lora["rank"], alpha=ALPHA, target_modules=chosen_layers(model, lora))
        seed = lora.get("seed")
        seed = int.from_bytes(blake2b(model_id.encode(), digest_size=4).digest()) if seed is None else seed
        return self._policy(model, Adapters(model, settings, seed=seed, base=self._folder))

    def _policy(self, model: Any, adapters: Adapters | None) -> Policy:
        return Policy(
            model,
            adapters,
            ranks=LearnerRanks(),
            device=self._device,
            temperature=1.0,
            dtype=self._config.model.dtype,
            gradient_checkpointing=self._config.learner.gradient_checkpointing,
        )

    def run(self, model_id: str, request: PassRequest, *, oldest: Sequence[int] | None = None) -> Outcome:
        """One pass; gradients add up until the next optimizer step. `oldest`: (datum, version) of its oldest samples.
        Raises Rejected, with nothing changed.
        """
        model = self.find(model_id)
        lag = None if oldest is None else self._checked_lag(model, *oldest)
        loss, needed, config = find_loss(request.loss_fn, request.config)
        vocabulary = model.policy.model.get_input_embeddings().num_embeddings
        inputs = [
            checked(datum, index, request.loss_fn, needed, config, most=self._max_tokens, vocabulary=vocabulary)
            for index, datum in enumerate(request.data)
        ]
        if not inputs:
            raise Rejected("missing data: a forward pass takes at least one datum")
        held = _take_gradients(model)
        try:
            with torch.set_grad_enabled(not request.forward_only):
                outcome = self._passes(model, request, inputs, (loss, config))
        except BaseException:
            _put_gradients(model, held, adds=False)
            raise
        _put_gradients(model, held, adds=True)
        if lag is not None:
            outcome.metrics["lag:max"] = float(lag)
        return outcome

    def _checked_lag(self, model: Model, datum: int, version: int) -> int:
        """Optimizer steps since the version. Raises Rejected for more than serve.max_staleness."""
        lag, most = max(0, model.n_steps - version), self._config.serve.max_staleness
        if most is not None and lag > most:
            raise Rejected(
                f"stale samples: datum {datum} was sampled by version {version} of the weights, {lag} optimizer steps "
                f"ago; serve.max_staleness is {most}: sample with newer weights, or leave the datum out"
            )
        return lag

    def _passes(self, model: Model, request: PassRequest, inputs: Sequence[Inputs], how: Any) -> Outcome:
        loss, config = how
        pieces = [_piece(datum, own["target_tokens"]) for datum, own in zip(request.data, inputs, strict=True)]
        capacity = model.policy.row_tokens(self._config.learner.max_tokens_per_mb)
        logps: list[Any] = [None] * len(pieces)
        total = 0.0
        for part in pack([piece.n_read for piece in pieces], capacity=capacity):
            logp_N, _ = model.policy.logprobs([pieces[i] for i in part])
            lengths = [len(pieces[i].places_K) for i in part]
            value = _loss(loss, config, logp_N, [inputs[i] for i in part], lengths)
            if not math.isfinite(float(value.detach())):
                raise Rejected(
                    f"loss {request.loss_fn} is {float(value.detach())}: log-probs or advantages are too large"
                )
            if not request.forward_only:
                value.backward()  # type: ignore[no-untyped-call]
            total += float(value.detach())
            for i, logp_K in zip(part, torch.split(logp_N.detach(), lengths), strict=True):
                logps[i] = logp_K.cpu().numpy().reshape(request.data[i].inputs["target_tokens"].shape)
        return Outcome(logps, {"loss:sum": total})

    def step(self, model_id: str, given: Mapping[str, Any]) -> dict[str, float]:
        """An optimizer step by AdamW on the gradients since the last one. Raises Rejected, with nothing changed."""
        model = self.find(model_id)
        params = checked_adam(given)
        parameters = list(model.policy.parameters().values())
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0
        if not math.isfinite(norm):
            model.optimizer.zero_grad()
            raise Rejected(f"gradient norm is {norm}: the gradients are dropped, the weights are unchanged")
        if params["grad_clip_norm"] > 0:
            clip_grad_norm_(parameters, params["grad_clip_norm"])
        for group in model.optimizer.param_groups:
            group["lr"], group["betas"] = params["learning_rate"], (params["beta1"], params["beta2"])
            group["eps"], group["weight_decay"] = params["eps"], params["weight_decay"]
        model.optimizer.step()
        model.optimizer.zero_grad()
        model.n_steps += 1
        return {"grad_norm:mean": norm, "step:max": float(model.n_steps)}

    def save(
        self,
        model_id: str,
        folder: Path,
        *,
        optimizer: bool,
        overwrite: bool,
        meta: Mapping[str, Any],
        gradients: bool = False,
        for_others: bool = False,
    ) -> None:
        """Write weights, with the optimizer's state or without, as a folder; `for_others`: one that transformers (or
        peft) loads. Raises Rejected for one that exists.
        """
        model = self.find(model_id)
        if folder.exists() and not overwrite and read_meta(folder).get("call") != meta.get("call"):
            raise Rejected(f"checkpoint {folder.name!r} exists: choose another name, or overwrite it")
        weights = {name: p.detach().cpu().contiguous() for name, p in model.policy.parameters().items()}
        with _written(folder) as building:
            if model.policy.adapters is not None:
                model.policy.adapters.write(building, weights)
            else:
                save_file(weights, str(building / WEIGHTS), metadata={"format": "pt"})
            if for_others:
                self._describe(building, model)
            if optimizer:
                save_file(_moments(model), str(building / OPTIMIZER))
            if gradients:
                save_file(_gradients(model), str(building / GRADIENTS))
            facts = {"lora": model.lora, "n_steps": model.n_steps, "optimizer": optimizer, "digest": digest_of(weights)}
            (building / META).write_text(json.dumps({**meta, **facts}), encoding="utf-8")

    def _describe(self, folder: Path, model: Model) -> None:
        """Write the tokenizer, and the config of a whole model."""
        load_tokenizer(self._folder).save_pretrained(folder)
        if model.policy.adapters is None:
            own = model.policy.model
            own.config.save_pretrained(folder)
            config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
            config |= {"dtype": "float32", "architectures": [type(own).__name__]}
            (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
            if getattr(own, "generation_config", None) is not None:
                own.generation_config.save_pretrained(folder)

    def load(self, model_id: str, folder: Path, *, optimizer: bool) -> None:
        """Take the weights of a saved state, and the optimizer's. Raises Rejected when they do not fit."""
        model, meta = self.find(model_id), read_meta(folder)
        if optimizer and not meta["optimizer"]:
            raise Rejected(
                f"missing optimizer state in {folder.name}: it was saved for sampling; load the weights only"
            )
        adapters = model.policy.adapters
        if (adapters is None) != (meta["lora"] is None):
            raise Rejected("kind mismatch: adapters load into a model of adapters, whole weights into a whole model")
        try:
            if adapters is not None:
                adapters.read(folder)
            else:
                _copy(model.policy.parameters(), load_file(str(folder / WEIGHTS)))
        except (CheckpointError, KeyError, RuntimeError) as error:
            raise Rejected(f"shape mismatch: the saved weights do not fit this model: {error}") from error
        model.optimizer.state.clear()
        model.optimizer.zero_grad()
        model.n_steps = meta["n_steps"] if optimizer else 0
        if optimizer:
            _restore(model, load_file(str(folder / OPTIMIZER)))
        if (folder / GRADIENTS).exists():
            for name, gradient in load_file(str(folder / GRADIENTS)).items():
                model.policy.parameters()[name].grad = gradient.to(self._device)

    def drop(self, model_id: str) -> None:
        self.models.pop(model_id, None)

    def find(self, model_id: str) -> Model:
        if model_id not in self.models:
            raise Rejected(f"unknown model {model_id!r}: it was unloaded, or its session has ended", status=404)
        return self.models[model_id]


def chosen_layers(model: Any, lora: Mapping[str, Any]) -> tuple[str, ...]:
    """Last parts of the names of the layers that get adapters. None means all."""
    mlp, attention = lora.get("train_mlp") is not False, lora.get("train_attn") is not False
    if mlp and attention:
        return ()
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    found = {name.rpartition(".")[2] for name in names if ("attn" in name and attention) or (".mlp." in name and mlp)}
    if not found:
        raise Rejected("no layer would have an adapter: set train_mlp or train_attn")
    return tuple(sorted(found))


def checked(
    datum: Datum, index: int, loss_fn: str, needed: Sequence[str], config: LossConfig, *, most: int, vocabulary: int
) -> dict[str, Tensor]:
    """The inputs of the loss, each as long as the targets, flat. Raises Rejected."""
    n, given = len(datum.ids_T), datum.inputs
    if not 0 < n <= most:
        raise Rejected(f"datum {index} is too long or empty: it has {n} tokens, the context holds {most}")
    targets = given.get("target_tokens")
    if targets is None:
        raise Rejected(f"missing target_tokens in datum {index}")
    if targets.ndim not in (1, 2) or targets.shape[0] != n or targets.dtype.kind != "i" or not targets.size:
        raise Rejected(
            f"shape mismatch in datum {index}: {n} tokens need {n} rows of whole target_tokens, got {targets.shape}"
        )
    ids = np.concatenate([datum.ids_T, targets.ravel()])
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise Rejected(
            f"unknown token in datum {index}: ids are from 0 to {vocabulary - 1}, got {ids.min()} to {ids.max()}"
        )
    found = {"target_tokens": torch.from_numpy(np.array(targets.ravel(), np.int64))}
    if loss_fn == "cross_entropy":
        given = {"weights": np.ones(targets.shape, np.float32), **given}
    for name in [*needed, *(config.keys() & given.keys())]:
        values = given.get(name)
        if values is None:
            raise Rejected(f"missing {name} in datum {index}: loss {loss_fn} needs {', '.join(needed)}")
        if values.shape != targets.shape:
            raise Rejected(f"shape mismatch in datum {index}: {name} has {values.shape}, target_tokens {targets.shape}")
        if not np.isfinite(values).all():
            raise Rejected(f"{name} of datum {index} holds a NaN or an infinity")
        found[name] = torch.from_numpy(np.array(values.ravel(), np.float32))
    return found


def checked_adam(given: Mapping[str, Any]) -> dict[str, float]:
    """The settings of a step with defaults. Raises Rejected."""
    if odd := sorted(given.keys() - ADAM.keys()):
        raise Rejected(f"unsupported optimizer setting {odd[0]!r}: this server has AdamW with {', '.join(ADAM)}")
    params = {**ADAM, **given}
    for name, value in params.items():
        is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        if not is_number or value < 0 or (name.startswith("beta") and value >= 1):
            raise Rejected(
                f"invalid {name}: it must be a number from 0{' to below 1' if name[0] == 'b' else ''}, got {value}"
            )
    return {name: float(value) for name, value in params.items()}


def read_meta(folder: Path) -> dict[str, Any]:
    """What a saved state says of itself. Raises Rejected for a missing one."""
    try:
        return dict(json.loads((folder / META).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise Rejected(f"missing checkpoint {folder.name}: {error}", status=404) from None


def _piece(datum: Datum, targets_K: Tensor) -> SequencePiece:
    """Every position predicts; several targets of one repeat it."""
    n = len(datum.ids_T)
    places = torch.arange(1, n + 1).repeat_interleave(len(targets_K) // n)
    return SequencePiece(torch.from_numpy(np.array(datum.ids_T, np.int64)), places, targets_K=targets_K)


def _loss(loss: Loss, config: Any, logp_N: Tensor, inputs: Sequence[Inputs], lengths: Sequence[int]) -> Tensor:
    names = set.union(*(set(own) for own in inputs))
    joined = {
        name: torch.cat(
            [own[name] if name in own else torch.full_like(own["advantages"], config[name]) for own in inputs]
        )
        for name in names
    }
    joined = {name: values_N.to(logp_N.device) for name, values_N in joined.items()}
    return loss(logp_N, joined, config, lengths)


def _take_gradients(model: Model) -> list[Tensor | None]:
    parameters = model.policy.parameters().values()
    held = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    return held


def _put_gradients(model: Model, held: Sequence[Tensor | None], *, adds: bool) -> None:
    for parameter, before in zip(model.policy.parameters().values(), held, strict=True):
        if not adds or parameter.grad is None:
            parameter.grad = before
        elif before is not None:
            parameter.grad = before.add_(parameter.grad)


def _moments(model: Model) -> dict[str, Tensor]:
    found = {}
    for name, parameter in model.policy.parameters().items():
        for key, value in model.optimizer.state.get(parameter, {}).items():
            found[f"{key}/{name}"] = value.detach().cpu().contiguous()
    return found


def _gradients(model: Model) -> dict[str, Tensor]:
    named = model.policy.parameters().items()
    return {name: p.grad.cpu().contiguous() for name, p in named if p.grad is not None}


def _restore(model: Model, moments: Mapping[str, Tensor]) -> None:
    for name, parameter in model.policy.parameters().items():
        if f"step/{name}" in moments:
            own = {key: moments[f"{key}/{name}"] for key in MOMENTS}
            model.optimizer.state[parameter] = {
                key: value if key == "step" else value.to(parameter.device) for key, value in own.items()
            }


@torch.no_grad()
def _copy(parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


@contextmanager
def _written(folder: Path) -> Iterator[Path]:
    """A folder under a temporary name, which gets its name at the end. Raises Rejected for a full or refusing disk."""
    try:
        with temporary_folder(folder) as building:
            yield building
            _replace(building, folder)
    except (OSError, SafetensorError) as error:
        raise Rejected(f"checkpoint {folder.name} could not be written: {error}") from None


def _replace(building: Path, folder: Path) -> None:
    """Put the finished folder in its place; an older one goes first."""
    if folder.exists():
        old = folder.with_name(f".{folder.name}.old")
        shutil.rmtree(old, ignore_errors=True)  # of a writer that was killed
        folder.rename(old)
        building.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    else:
        building.rename(folder)
