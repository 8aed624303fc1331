"""Low-rank adapters: which layers of a model have them, their names and forms, and the merge. Imports no peft.

A linear layer with weight W (F, E) has A (R, E) and B (F, R), and computes with V = W + scale * B A. DoRA (arXiv
2402.09353) has magnitudes m (F,), too: row f of V is scaled to the norm m_f.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from areal_bus.config.learner import LoraConfig
from areal_bus.errors import ConfigError
from areal_bus.process.commands import install_command
from areal_bus.weights.snapshot import digest_of

BASE_DIGEST = "base.digest"  # in a push beside the adapters: identifies the weights that they belong to


def has_package(name: str) -> bool:
    """Whether it is installed. Imports nothing."""
    return find_spec(name) is not None


def check_peft() -> None:
    """Raises ConfigError without peft. Imports nothing."""
    if not has_package("peft"):
        raise ConfigError(f"actor.lora needs the package peft, which is not installed: run {install_command('lora')}")


def adapted_layers(model: Any, wanted: Collection[str]) -> dict[str, nn.Linear]:
    """Name -> linear layer of the decoder that gets an adapter; `wanted`: last parts of names, none means all. Raises
    ConfigError for a name without a layer, and for a model without linear layers.
    """
    found = dict(_linear_layers(model))
    if not found:
        raise ConfigError(
            f"no linear layers (torch.nn.Linear) in the decoder layers of {type(model).__name__}: actor.lora adapts "
            "those; remove [actor.lora]"
        )
    names = sorted({_last(name) for name in found})
    missing = [name for name in wanted if name not in names]
    if missing:
        raise ConfigError(
            f"unknown layer {missing[0]!r} in actor.lora.target_modules: the linear layers are {', '.join(names)}"
        )
    return {name: layer for name, layer in found.items() if not wanted or _last(name) in wanted}


def _linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    modules = dict(model.named_modules())
    blocks = tuple(f"{name}." for name, module in modules.items() if type(module).__name__.endswith("DecoderLayer"))
    for name, module in modules.items():
        inside = name.startswith(blocks) if blocks else module is not model.get_output_embeddings()
        if isinstance(module, nn.Linear) and inside:
            yield name, module


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def patterns(model: Any, chosen: Sequence[str]) -> list[str]:
    """The chosen layers as peft's target_modules: last parts of names where these select no other module."""
    short = sorted({_last(name) for name in chosen})
    selected = {name for name, _ in model.named_modules() if _last(name) in short}
    return short if selected == set(chosen) else list(chosen)


def names_of(layer: str) -> tuple[str, str]:
    """Names of the matrices A and B of a layer, as peft's files have them without their prefix."""
    return f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"


def magnitude_of(layer: str) -> str:
    """Name of a layer's magnitudes in the same files."""
    return f"{layer}.lora_magnitude_vector"


def of_layer(layer: str, tensors: Mapping[str, Tensor], device: torch.device) -> tuple[Tensor, Tensor, Tensor | None]:
    """A, B and, of DoRA, the magnitudes of a layer, on the device."""
    a_RE, b_FR = (tensors[name].to(device) for name in names_of(layer))
    m_F = tensors.get(magnitude_of(layer))
    return a_RE, b_FR, None if m_F is None else m_F.to(device)


def adapter_tensors(shapes: Mapping[str, Sequence[int]], lora: LoraConfig) -> dict[str, Tensor]:
    """The tensors of a push, on the meta device: float32 adapters of weights (F, E), and the base's digest."""
    found: dict[str, Tensor] = {}
    for layer, (n_out, n_in) in shapes.items():
        rank, (a, b) = lora.form(layer)[0], names_of(layer)
        forms: dict[str, tuple[int, ...]] = {a: (rank, n_in), b: (n_out, rank)}
        forms |= {magnitude_of(layer): (n_out,)} if "dora" in lora.variant else {}
        found |= {name: torch.empty(*form, dtype=torch.float32, device="meta") for name, form in forms.items()}
    return found | {BASE_DIGEST: torch.empty(16, dtype=torch.uint8, device="meta")}


def merged(base_FE: Tensor, a_RE: Tensor, b_FR: Tensor, scale: float, m_F: Tensor | None = None) -> Tensor:
    """(F, E) float32: the weight with its adapter, on the adapter's device. The operations are those of peft."""
    product_FE = torch.mm(b_FR.float(), a_RE.float()).mul_(scale)
    product_FE.add_(base_FE.to(product_FE.device))
    return product_FE if m_F is None else product_FE.mul_((m_F / row_norms(product_FE)).unsqueeze(1))


def row_norms(weight_FE: Tensor) -> Tensor:
    """(F,) float32."""
    norms_F: Tensor = torch.linalg.vector_norm(weight_FE.float(), dim=1)
    return norms_F


def base_digest(weights: Mapping[str, Tensor]) -> Tensor:
    """(16,) uint8: digest of the base weights by name. A collective if they are sharded."""
    return torch.tensor(list(bytes.fromhex(digest_of(weights))), dtype=torch.uint8)
