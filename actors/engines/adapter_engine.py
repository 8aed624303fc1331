"""An `Engine` that merges adapters into base weights (always from the base, in float32) for an engine without them."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

from actors.engines.protocol import Engine, check_order
from actors.models.lora import BASE_DIGEST, adapted_layers, adapter_tensors, base_digest, merged, of_layer
from areal_bus.config.learner import LoraConfig
from areal_bus.config.sections import Config
from areal_bus.errors import ConfigError, EngineError


def with_adapters(engine: Engine, model: Any, config: Config, *, base_on: torch.device, is_live: bool) -> Engine:
    """The engine with the adapters of actor.lora on the weights of `model`; the engine itself without actor.lora."""
    lora = config.actor.lora
    if lora is None:
        return engine
    layers = list(adapted_layers(model, lora.target_modules))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return cast(Engine, AdapterEngine(engine, weights, layers, lora, base_on=base_on, is_live=is_live))


class AdapterEngine:
    """Makes the weights of `engine` and passes everything else on to it."""

    def __init__(
        self,
        engine: Engine,
        weights: Mapping[str, Tensor],
        layers: list[str],
        lora: LoraConfig,
        *,
        base_on: torch.device,
        is_live: bool,
    ) -> None:
        """`layers` of `weights` are copied to `base_on`. `is_live`: merges write into `parameters`, else `weights`."""
        self._engine, self._lora, self._layers, self._is_live = engine, lora, layers, is_live
        self._weights = weights
        self._digest = base_digest(weights)
        self._base = {layer: weights[f"{layer}.weight"].detach().to(base_on, copy=True) for layer in layers}
        self._forms = adapter_tensors({layer: base.shape for layer, base in self._base.items()}, lora)
        self._held: tuple[int, int] | None = None

    def parameters(self) -> Mapping[str, Any]:
        """Name -> tensor of a push, on the meta device: the adapters and the digest of their base."""
        return self._forms

    @torch.no_grad()
    def update(self, version: int, tensors: Mapping[str, Any], *, term: int = 0) -> Mapping[str, Any]:
        """Merge new adapters and swap them in; returns `tensors`. Raises EngineError (nothing changed), ConfigError."""
        check_order(self._held, term, version)
        self._check(tensors)
        weights = dict(self._engine.parameters() if self._is_live else self._weights)
        into = getattr(self._engine, "next_parameters", lambda: weights)()  # several versions: no weights of a held one
        for layer, base_FE in self._base.items():
            weight = weights[f"{layer}.weight"] = into[f"{layer}.weight"]
            a_RE, b_FR, m_F = of_layer(layer, tensors, weight.device)
            weight.copy_(merged(base_FE, a_RE, b_FR, self._lora.scale(layer), m_F))
        self._engine.update(version, weights, term=term)
        self._held = (term, version)
        return tensors

    def _check(self, tensors: Mapping[str, Any]) -> None:
        odd = sorted(tensors.keys() ^ self._forms.keys())
        odd = odd or [name for name, form in self._forms.items() if tensors[name].shape != form.shape]
        if odd:
            raise EngineError(f"an update brings every adapter and no other tensor: {len(odd)} differ ({odd[0]})")
        if not torch.equal(tensors[BASE_DIGEST].cpu(), self._digest):
            raise ConfigError(
                "adapters belong to one base: the learner's model.path has other weights than this generator's; give "
                "all hosts the same model"
            )

    def __getattr__(self, name: str) -> Any:
        """Everything else is the engine's."""
        return getattr(self._engine, name)
