"""The low-rank adapters of a policy: injected by peft, written and read in its format, named as in its files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional

from actors.learner.model.nf4 import Nf4Linear
from actors.models.lora import BASE_DIGEST, adapted_layers, base_digest, check_peft, patterns, row_norms
from actors.models.model_config import PREFIX, WEIGHTS_FILE, is_adapter_folder, misfit
from areal_bus.config.learner import LoraConfig
from areal_bus.errors import CheckpointError, ConfigError

NAME = "default"  # of the one adapter in the model


class HostLinear(nn.Linear):
    """A frozen linear layer whose weight stays in host memory; each use copies it to the device of the input."""

    def forward(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight.to(x.device), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> "HostLinear":
        """Moves the bias only."""
        weight = self._parameters.pop("weight")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._parameters["weight"] = weight
        return self


class Adapters:
    """The adapters of one model. They are float32 and random by a seed; B is zero, so they change nothing at first."""

    def __init__(self, model: Any, lora: LoraConfig, *, seed: int, base: str, on_host: bool = False) -> None:
        """Adds adapters to the frozen model. `base`: its folder or id. `on_host`: adapted weights stay in host memory.

        Raises ConfigError: unknown targets; peft refuses.
        """
        check_peft()
        from peft import LoraConfig as PeftConfig  # optional
        from peft import inject_adapter_in_model

        chosen = list(adapted_layers(model, lora.target_modules))
        own = {name: lora.form(name) for name in lora.target_modules}
        self.config = PeftConfig(
            r=lora.rank,
            lora_alpha=_whole(lora.alpha),
            lora_dropout=lora.dropout,
            target_modules=patterns(model, chosen),
            rank_pattern={name: rank for name, (rank, _) in own.items() if rank != lora.rank},
            alpha_pattern={name: _whole(alpha) for name, (_, alpha) in own.items() if alpha != lora.alpha},
            use_rslora="rslora" in lora.variant,
            use_dora="dora" in lora.variant,
            task_type="CAUSAL_LM",
            base_model_name_or_path=base,
        )
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                inject_adapter_in_model(self.config, model)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"actor.lora needs a model that peft wraps: {type(model).__name__}: {error}") from error
        self._model, self._lora, self._names = model, lora, chosen
        self._digest: dict[str, Tensor] | None = None
        self._layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        for parameter in self.parameters().values():
            parameter.data = parameter.data.float()
        for layer in self._layers:
            layer.cast_input_dtype_enabled = False  # autocast and FSDP cast; a copy of each input would be kept
            if "dora" in lora.variant:  # peft's are rounded to the type of the base
                layer.lora_magnitude_vector[NAME].weight.data = row_norms(layer.base_layer.weight)
            if on_host:
                layer.base_layer.__class__ = HostLinear
        if "nf4" in lora.variant:
            self._digest = self.digest()  # generators have the weights as they were
            for layer in self._layers:
                layer.base_layer.__class__ = Nf4Linear
                layer.base_layer.take()
        self.drop(False)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Name -> adapter; DTensors when the model is sharded."""
        parameters = self._model.named_parameters()
        return {_plain(name): parameter for name, parameter in parameters if f".{NAME}." in name}

    def base(self) -> dict[str, Tensor]:
        """Name -> weight of the model itself; a tied weight once."""
        parameters = self._model.named_parameters()
        return {
            name.replace(".base_layer.", "."): parameter for name, parameter in parameters if f".{NAME}." not in name
        }

    def digest(self) -> dict[str, Tensor]:
        """The digest of the base weights, as part of a push. A collective if they are sharded."""
        return {BASE_DIGEST: base_digest(self.base())} if self._digest is None else self._digest

    def drop(self, is_on: bool) -> None:
        """Turn dropout on or off."""
        for layer in self._layers:
            layer.lora_dropout.train(is_on)

    @contextmanager
    def off(self) -> Iterator[None]:
        """The model computes without adapters. peft's own switch sets `requires_grad`, which FSDP2 reads only once."""
        for layer in self._layers:
            layer._disable_adapters = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer._disable_adapters = False

    def write(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write adapter_config.json and adapter_model.safetensors with these float32 adapters."""
        replace(self.config, inference_mode=True).save_pretrained(str(folder))
        tensors = {f"{PREFIX}{name}": tensor.contiguous() for name, tensor in weights.items()}
        save_file(tensors, str(folder / WEIGHTS_FILE), metadata={"format": "pt"})

    def read(self, folder: Path) -> None:
        """Take the adapters of a checkpoint, before sharding. Raises CheckpointError for those of other settings."""
        check_folder(folder, has_lora=True)
        if why := misfit(folder, self._lora, self._names):
            raise CheckpointError(f"{why}; a run keeps its adapters")
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in load_file(str(folder / WEIGHTS_FILE)).items()}
        with torch.no_grad():
            for name, parameter in self.parameters().items():
                parameter.copy_(tensors[name])


def check_folder(folder: Path, *, has_lora: bool) -> None:
    """Raises CheckpointError for the model of a checkpoint with adapters in a run without them, and the reverse."""
    if is_adapter_folder(folder) == has_lora:
        return
    if has_lora:
        raise CheckpointError(
            f"a run with actor.lora goes on from a checkpoint of adapters: {folder} holds a whole model; remove "
            f'[actor.lora], or start a new run with model.path = "{folder}"'
        )
    raise CheckpointError(
        f"a run without actor.lora goes on from a checkpoint of a whole model: {folder} holds adapters; set "
        f'[actor.lora] as it was, or start a new run with model.path = "{folder}", which merges them'
    )


def _plain(name: str) -> str:
    """The name in peft's files, where magnitudes are no layer."""
    return name.replace(f"_vector.{NAME}.weight", "_vector").replace(f".{NAME}.", ".")


def _whole(alpha: float) -> Any:
    """As peft's files have it."""
    return int(alpha) if alpha == int(alpha) else alpha
