"""Llama decoder layers by fused operations, forward and backward, and the check that decides where a model uses them.

It computes what the layer of transformers computes over a packed row, in another order of sums, for one learner in
float32 on a CPU. The scales of both norms are multiplied into the weights that follow. C kernels compute the operations
between the matrix products; where they do not apply, the layers of transformers run. `Norm` is the final RMSNorm, in
one or two passes over a row.

Shapes: S tokens of the row, C channels of it, H query heads, K key heads, D head width, A = (H + 2 K) D, X = H D,
G gates.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.activations import SiLUActivation
from transformers.modeling_layers import GradientCheckpointingLayer

from areal_cpu import fused_mlp_qkv
from areal_cpu.fused_mlp_qkv import RopeAngles
from areal_cpu.layer_kernels import LayerKernels, found, made
from areal_cpu.layer_ops import LayerPath, UnfusedOps
from areal_cpu.sequences import Sequences


class Packing(Protocol):
    """What a packed forward passes to the layers."""

    @property
    def sequences(self) -> Sequences | None: ...


@dataclass(frozen=True, slots=True)
class Heads:
    """Of one layer's attention."""

    n_query: int
    n_key: int
    width: int
    scale: float

    @property
    def n_rope(self) -> int:
        """Number of query and key heads, which come first."""
        return self.n_query + self.n_key


class LlamaLayer(GradientCheckpointingLayer):
    """A fused decoder layer: replaces the class of a layer, keeps its modules and parameters."""

    plain: Any  # its original class
    self_attn: Any
    mlp: Any
    input_layernorm: Any
    post_attention_layernorm: Any

    def forward(
        self,
        hidden_states: Tensor,
        *others: Any,
        position_embeddings: tuple[Tensor, Tensor],
        packing: Packing | None = None,
        **more: Any,
    ) -> Tensor:
        """(1, S, C) -> (1, S, C). The original forward runs without `packing`, and where no kernels apply."""
        cos_SD, sin_SD = (part[0] for part in position_embeddings)
        sequences = None if packing is None else packing.sequences
        if sequences is None or found(hidden_states, cos_SD, sin_SD) is None:
            rest = more if packing is None else more | {"packing": packing}
            out: Tensor = self.plain.forward(
                self, hidden_states, *others, position_embeddings=position_embeddings, **rest
            )
            return out
        attention, mlp = self.self_attn, self.mlp
        h_SC = hidden_states.flatten(0, 1)  # a view: the gradient of [0] would be copied
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        heads = Heads(
            attention.q_proj.out_features // attention.head_dim,
            attention.k_proj.out_features // attention.head_dim,
            attention.head_dim,
            attention.scaling,
        )
        qkv_SA = _Qkv.apply(  # type: ignore[no-untyped-call]
            h_SC, cos_SD, sin_SD, heads, self.input_layernorm.variance_epsilon,
            self.input_layernorm.weight, *(part.weight for part in parts), *(part.bias for part in parts),
        )  # fmt: skip
        attn_SX = _AttentionInput.apply(qkv_SA, sequences, heads)  # type: ignore[no-untyped-call]
        out_SC = _Mlp.apply(  # type: ignore[no-untyped-call]
            h_SC, attn_SX, self.post_attention_layernorm.variance_epsilon, self.post_attention_layernorm.weight,
            attention.o_proj.weight, mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight,
        )  # fmt: skip
        return out_SC.unsqueeze(0)  # type: ignore[no-any-return]


def _path(n_bytes: int, *tensors: Tensor) -> LayerPath:
    """The implementation for these tensors, by the bytes of the largest weight."""
    return fused_mlp_qkv if fused_mlp_qkv.applies(*tensors, n_bytes=n_bytes) else UnfusedOps(made())


class _Qkv(torch.autograd.Function):
    """RMSNorm, QKV projection and RoPE: (S, C) -> (S, A)."""

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, cos_SD: Tensor, sin_SD: Tensor, heads: Heads, epsilon: float, scale_C: Tensor,
        *parts: Any,
    ) -> Tensor:  # fmt: skip
        weights, biases = parts[:3], parts[3:]
        weight_AC, bias_A = torch.cat(weights), None if biases[0] is None else torch.cat(biases)
        ctx.path = _path(weight_AC.nbytes, x_SC, cos_SD, sin_SD)
        ctx.n_rope, ctx.has_bias = heads.n_rope, bias_A is not None
        angles = RopeAngles(cos_SD, sin_SD, heads.n_rope)
        qkv_SA, normed_SC, rstd_S1 = ctx.path.qkv_forward(x_SC, weight_AC, scale_C, bias_A, angles, epsilon)
        ctx.save_for_backward(normed_SC, rstd_S1, cos_SD, sin_SD, scale_C, *weights)
        out_SA: Tensor = qkv_SA
        return out_SA

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SA: Tensor) -> tuple[Tensor | None, ...]:
        """Undoes RoPE in the memory of the gradient, which `_AttentionInput` owns: once only."""
        normed_SC, rstd_S1, cos_SD, sin_SD, scale_C, *weights = ctx.saved_tensors
        angles = RopeAngles(cos_SD, sin_SD, ctx.n_rope)
        by_x_SC, by_weight_AC, by_scale_C, by_bias_A = ctx.path.qkv_backward(
            grad_SA, normed_SC, rstd_S1, torch.cat(weights), scale_C, angles, has_bias=ctx.has_bias
        )
        sizes = [len(weight) for weight in weights]
        by_biases = (None, None, None) if by_bias_A is None else torch.split(by_bias_A, sizes)
        return by_x_SC, None, None, None, None, by_scale_C, *torch.split(by_weight_AC, sizes), *by_biases


class _AttentionInput(torch.autograd.Function):
    """Causal attention of each sequence to itself: (S, A) -> (S, X)."""

    @staticmethod
    def forward(ctx: Any, qkv_SA: Tensor, sequences: Sequences, heads: Heads) -> Tensor:
        attn_SX, total_SH = made().attention(
            qkv_SA, sequences, n_query=heads.n_query, n_key=heads.n_key, scale=heads.scale
        )
        ctx.sequences, ctx.heads = sequences, heads
        ctx.save_for_backward(qkv_SA, attn_SX, total_SH)
        return attn_SX

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SX: Tensor) -> tuple[Tensor, None, None]:
        (qkv_SA, attn_SX, total_SH), heads = ctx.saved_tensors, ctx.heads
        by_qkv_SA = made().attention_back(
            grad_SX.contiguous(), qkv_SA, attn_SX, total_SH, ctx.sequences, n_key=heads.n_key, scale=heads.scale
        )
        return by_qkv_SA, None, None


class _Mlp(torch.autograd.Function):
    """Output projection, residual and MLP of a layer: (S, C), (S, X) -> (S, C)."""

    @staticmethod
    def forward(
        ctx: Any, x_SC: Tensor, attn_SX: Tensor, epsilon: float, scale_C: Tensor, out_CX: Tensor, gate_GC: Tensor,
        up_GC: Tensor, down_CG: Tensor,
    ) -> Tensor:  # fmt: skip
        gate_up_G2C = torch.cat([gate_GC, up_GC])
        ctx.path = _path(gate_up_G2C.nbytes, x_SC, attn_SX)
        out_SC: Tensor
        out_SC, kept = ctx.path.mlp_forward(x_SC, attn_SX, epsilon, scale_C, out_CX, gate_up_G2C, down_CG)
        ctx.save_for_backward(attn_SX, *kept, scale_C, out_CX, gate_GC, up_GC, down_CG)
        return out_SC

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SC: Tensor) -> tuple[Tensor | None, ...]:
        """Overwrites the saved gates: once only."""
        attn_SX, normed_SC, rstd_S1, both_SG2, scale_C, out_CX, gate_GC, up_GC, down_CG = ctx.saved_tensors
        by_x_SC, by_attn_SX, by_scale_C, by_out_CX, by_gate_up_G2C, by_down_CG = ctx.path.mlp_backward(
            grad_SC.contiguous(), attn_SX, (normed_SC, rstd_S1, both_SG2), scale_C, out_CX,
            torch.cat([gate_GC, up_GC]), down_CG,
        )  # fmt: skip
        by_gate_GC, by_up_GC = by_gate_up_G2C.chunk(2)
        return by_x_SC, by_attn_SX, None, by_scale_C, by_out_CX, by_gate_GC, by_up_GC, by_down_CG


NORMS = {"LlamaRMSNorm", "MistralRMSNorm", "Qwen2RMSNorm"}
LAYERS = {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer"}
TOLERANCE = 1e-4  # of the largest gradient of each parameter
TINY = 1e-6  # a smaller gradient is rounding error


def applies(model: Any) -> bool:
    """Whether `LlamaLayer` computes all decoder layers of the model: C kernels, long enough vectors, Llama layers."""
    kernels, layers = found(), _layers(model)
    return bool(kernels is not None and kernels.attends and layers) and all(
        layer.mlp.act_fn.__class__ in (nn.SiLU, SiLUActivation)
        and layer.self_attn.o_proj.bias is None
        and layer.mlp.down_proj.bias is None
        and layer.mlp.gate_proj.bias is None
        for layer in layers
    )


def disagreement(model: Any, loss: Callable[[], Tensor]) -> str | None:
    """Replace the layers of a model. If loss or gradients differ, undo it and return the reason."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    plain = loss()
    plain.backward()  # type: ignore[no-untyped-call]
    largest = [_most(parameter.grad) for parameter in parameters]
    parts = [(layer, LlamaLayer) for layer in _layers(model)] + [(norm, Norm) for norm in _last_norms(model)]
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


class Norm(nn.Module):
    """A fused RMSNorm: replaces the class of a norm, keeps its parameter."""

    plain: Any  # its original class
    weight: Tensor
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(.., C) -> (.., C). The original forward runs where no kernels apply."""
        x_SC = hidden_states.reshape(-1, hidden_states.shape[-1])
        if found(x_SC) is None:
            return self.plain.forward(self, hidden_states)  # type: ignore[no-any-return]
        out_SC = _Normed.apply(x_SC, self.variance_epsilon, self.weight)  # type: ignore[no-untyped-call]
        return out_SC.view(hidden_states.shape)  # type: ignore[no-any-return]


class _Normed(torch.autograd.Function):
    """Over the root mean square, times the scale: (S, C) -> (S, C)."""

    @staticmethod
    def forward(ctx: Any, x_SC: Tensor, epsilon: float, scale_C: Tensor) -> Tensor:
        normed_SC, rstd_S1 = made().norm(x_SC, epsilon)
        ctx.save_for_backward(normed_SC, rstd_S1, scale_C)
        return normed_SC * scale_C

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_SC: Tensor) -> tuple[Tensor, None, Tensor]:
        """Works on a copy: other nodes may share the memory of the gradient."""
        normed_SC, rstd_S1, scale_C = ctx.saved_tensors
        ops: LayerKernels = made()
        by_x_SC = grad_SC.clone(memory_format=torch.contiguous_format)
        by_scale_C = ops.scale_back(by_x_SC, normed_SC, scale_C)
        by_x_SC = ops.norm_back(by_x_SC, normed_SC, rstd_S1)
        return by_x_SC, None, by_scale_C
