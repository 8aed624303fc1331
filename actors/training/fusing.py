"""Whether and where a policy's model gets the layers of `fused` and the norm of `normed`: where these apply and compute
what its own do.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from actors.training.fused import Layer
from actors.training.normed import Norm

NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"}
LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
TOLERANCE = 1e-4  # of the largest gradient of each parameter
TINY = 1e-6  # a gradient below is rounding


def applies(model: Any) -> bool:
    """Whether all decoder layers of a model are such as these."""
    layers = _layers(model)
    return bool(layers) and all(
        layer.mlp.act_fn.__class__ in (nn.SiLU, SiLUActivation)
        and layer.self_attn.o_proj.bias is None
        and layer.mlp.down_proj.bias is None
        and layer.mlp.gate_proj.bias is None
        for layer in layers
    )


def disagreement(model: Any, loss: Callable[[], Tensor]) -> str | None:
    """Put these layers in the place of a model's own; why not, where loss or gradients differ, and they are not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = loss()
    plain.backward()  # type: ignore[no-untyped-call]
    largest = [_most(parameter.grad) for parameter in parameters]
    parts = [(layer, Layer) for layer in _layers(model)] + [(norm, Norm) for norm in _last_norms(model)]
    for part, fused in parts:
        part.plain, part.__class__ = part.__class__, fused
    other = loss()
    (-other).backward()  # type: ignore[no-untyped-call]
    gaps = [_most(parameter.grad) / max(most, TINY) for parameter, most in zip(parameters, largest, strict=True)]
    model.zero_grad(set_to_none=True)
    gaps.append(abs(plain.item() - other.item()) / max(abs(plain.item()), 1.0))
    gap = math.nan if any(map(math.isnan, gaps)) else max(gaps)
    if gap <= TOLERANCE:
        return None
    for part, _ in parts:
        part.__class__ = part.plain
    return f"loss or gradients differ by {gap:.1e} of the largest, more than {TOLERANCE:g}"  # NaN differs, too


def _layers(model: Any) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ in LAYERS]


def _last_norms(model: Any) -> list[Any]:
    return [module for module in model.base_model.children() if type(module).__name__ in NORMS]


def _most(gradient: Tensor | None) -> float:
    return 0.0 if gradient is None else float(gradient.abs().max())
