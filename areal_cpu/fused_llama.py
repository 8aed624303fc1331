"""The Llama forward of the builtin engine: fused layers over its KV caches, merged linear layers; on a GPU by torch.

It computes what the module computes, in another order of sums: one product for queries, keys and values, one for gate
and up; a product adds the residual. It uses the weights of the module. Weights of one product must be contiguous in
memory, as a push delivers them; `bind` moves them if they are not. Decode steps of a small model read a packed copy,
which `bind` makes. Those of a larger model read the weights in place; with many rows they use torch's products.

Shapes: B rows, T tokens, N = B T, E width, H heads (queries', then keys', then values'), D head width, L positions, V
vocabulary, F outputs of a merged product.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_cpu.build import applies
from areal_cpu.decode_step import DecodeStep, Draws, LayerWeights, ModelWeights, PackedWeights, PlainWeights
from areal_cpu.layer_kernels import LayerKernels
from areal_cpu.matmul import MOST_PACKED, Weight
from areal_cpu.paged_attention import WIDEST
from areal_cpu.paged_cache import DecodeBlocks, FillBlocks, GivenTokens, PagedCache
from areal_cpu.sequences import CachePiece, Sequences


class MergedLinear:
    """Linear layers with the same input, merged into one product."""

    def __init__(self, parts: Sequence[nn.Linear], *, packs: bool) -> None:
        self._parts, self._packs = parts, packs
        self._panels: PackedWeights | None = None
        self.bind()

    def bind(self) -> None:
        biases = [part.bias for part in self._parts if part.bias is not None]
        self._weight_FE = together([part.weight for part in self._parts])
        self._bias_F = together(biases) if biases else None
        self._weight = Weight(self._weight_FE, self._bias_F, packs=self._packs)

    def __call__(self, x: Tensor) -> Tensor:
        return self._weight(x)

    def added(self, x: Tensor, to: Tensor) -> Tensor:
        """The product plus `to`."""
        return self._weight.added(x, to)

    def panels(self) -> PackedWeights:
        """The current weight in panels for C; the memory is reused."""
        if self._panels is None:
            self._panels = PackedWeights(self._weight_FE, self._bias_F)
        else:
            self._panels.fill(self._weight_FE, self._bias_F)
        return self._panels

    def plain(self) -> PlainWeights:
        """The current weight, unpacked, for C."""
        return PlainWeights(self._weight_FE, self._bias_F)


def together(parameters: Sequence[Tensor]) -> Tensor:
    """All rows as one tensor that shares their memory; moves them if they are not contiguous."""
    first, expected = parameters[0].data, parameters[0].data_ptr()
    for parameter in parameters:
        is_next = parameter.data_ptr() == expected and parameter.data.is_contiguous()
        if not is_next or parameter.data.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return _moved(parameters)
        expected += parameter.data.nbytes
    n_rows = sum(len(parameter) for parameter in parameters)
    return first.as_strided((n_rows, *first.shape[1:]), first.stride())


def _moved(parameters: Sequence[Tensor]) -> Tensor:
    whole = torch.cat([parameter.data for parameter in parameters])
    parts = torch.split(whole, [len(parameter) for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.data = part
    return whole


FAMILY = {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"}
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-9}  # of the largest logit
ROUGH = 0.03  # for bfloat16 and float16, whose rounding depends on the order of sums
FIRST = 10.0  # times as much for a text's first token: many models give it activations so large that rounding shows
PROBE = 12  # tokens of the comparison
MANY = 32  # rows of a decode step: from some 48 on oneDNN's products, which round otherwise, are as fast as those of C


class CacheView(Protocol):
    """A view of the KV cache: where keys and values are written, and which ones attention reads."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class ForwardCall:
    """Arguments that all layers of one forward pass share."""

    shape: tuple[int, int]  # B, T
    cos: Tensor  # (B, T, 1, D)
    sin: Tensor  # the same; for torch negative in the first half of D
    mask: Tensor | None  # added to the scores; None: plain causal
    view: CacheView | DecodeBlocks
    where: Sequences | None  # of a packed forward by kernels; there is no mask then


class FusedLayer:
    """Attention and MLP of one layer."""

    def __init__(
        self, layer: Any, index: int, heads: tuple[int, int], width: int, operations: "Operations", *, packs: bool
    ) -> None:
        """`heads`: of queries, and of keys. `width`: of a head."""
        attention, mlp = layer.self_attn, layer.mlp
        self._operations = operations
        self._index, (self._n_query, self._n_key), self._width = index, heads, width
        self._scale = attention.scaling
        self._first, self._second = layer.input_layernorm, layer.post_attention_layernorm
        self._of_heads = (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else None
        self._qkv = MergedLinear([attention.q_proj, attention.k_proj, attention.v_proj], packs=packs)
        self._out = MergedLinear([attention.o_proj], packs=packs)
        self._gate_up = MergedLinear([mlp.gate_proj, mlp.up_proj], packs=packs)
        self._down = MergedLinear([mlp.down_proj], packs=packs)

    def bind(self) -> None:
        for joined in (self._qkv, self._out, self._gate_up, self._down):
            joined.bind()

    @property
    def scale(self) -> float:
        return float(self._scale)

    def weights(self, *, copied: bool) -> LayerWeights:
        """The weights of this layer for decode steps in C."""
        query, key = (norm.weight.data for norm in self._of_heads) if self._of_heads is not None else (None, None)
        products = (of_step(joined, copied) for joined in (self._qkv, self._out, self._gate_up, self._down))
        return LayerWeights(self._first.weight.data, self._second.weight.data, query, key, *products)

    def __call__(self, h_NE: Tensor, call: ForwardCall) -> Tensor:
        norm, gated = self._operations.norm, self._operations.gated
        h_NE = self._out.added(self._attend(norm(self._first, h_NE), call), h_NE)
        return self._down.added(gated(self._gate_up(norm(self._second, h_NE))), h_NE)

    def _attend(self, x_NE: Tensor, call: ForwardCall) -> Tensor:
        n_query, n_both = self._n_query, self._n_query + self._n_key
        qkv_BTHD = self._qkv(x_NE).view(*call.shape, n_both + self._n_key, self._width)
        qk_BTHD = qkv_BTHD[:, :, :n_both]
        if self._of_heads is not None:
            queries, keys = self._of_heads
            qk_BTHD[:, :, :n_query] = norm(queries, qk_BTHD[:, :, :n_query])
            qk_BTHD[:, :, n_query:] = norm(keys, qk_BTHD[:, :, n_query:])
        if isinstance(call.view, DecodeBlocks):
            return call.view.attended(qkv_BTHD[:, 0], call.cos, call.sin, self._index, self._scale)
        if call.where is not None and isinstance(call.view, FillBlocks | NoCache):
            return self._packed(qkv_BTHD, call, call.view, call.where)
        torch.addcmul(qk_BTHD * call.cos, qk_BTHD.roll(self._width // 2, -1), call.sin, out=qk_BTHD)
        qk_BHTD, v_BHTD = qk_BTHD.transpose(1, 2), qkv_BTHD[:, :, n_both:].transpose(1, 2)
        k_BHLD, v_BHLD = call.view.update(qk_BHTD[:, n_query:], v_BHTD, self._index)
        seen_BHTD = attention(qk_BHTD[:, :n_query], k_BHLD, v_BHLD, call.mask, self._scale)
        return seen_BHTD.transpose(1, 2).reshape(len(x_NE), -1)

    def _packed(self, qkv_1THD: Tensor, call: ForwardCall, view: "FillBlocks | NoCache", where: Sequences) -> Tensor:
        """Attention of a packed prefill by the C kernels."""
        n_query, n_both, kernels = self._n_query, self._n_query + self._n_key, self._operations.kernels
        qkv_TA = qkv_1THD.view(qkv_1THD.shape[1], -1)
        kernels.rope(qkv_TA, call.cos[0, :, 0], call.sin[0, :, 0], n_heads=n_both, width=self._width)
        given = view.given
        if given is not None:
            qkv_TA = given.rows(qkv_TA, self._index)
        qkv_1HTD = qkv_TA.view(1, len(qkv_TA), -1, self._width).transpose(1, 2)
        view.write(qkv_1HTD[:, n_query:n_both], qkv_1HTD[:, n_both:], self._index)
        out_TX = kernels.attention(qkv_TA, where, n_query=n_query, n_key=self._n_key, scale=self._scale)[0]
        return out_TX if given is None else out_TX[given.computed_T]


def attention(q_BHTD: Tensor, k_BHLD: Tensor, v_BHLD: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """(B, H, T, D); H may be a multiple of the heads of keys and values. Without a mask it is causal.

    On a GPU flash attention has no mask, and whether the memory-efficient kernel has fewer key heads than query heads
    depends on the release; where none serves torch writes all scores down in float32. So with a mask it is never asked
    for: one token's query heads of a key head are so many tokens, which see the same; for more tokens keys and values
    are repeated. (Without a mask that is left to torch, and so float32 on a GPU to that form.)
    """
    group, one = q_BHTD.shape[1] // k_BHLD.shape[1], q_BHTD.shape[2] == 1
    if mask is None or group == 1:
        return F.scaled_dot_product_attention(
            q_BHTD,
            k_BHLD,
            v_BHLD,
            attn_mask=mask,
            is_causal=mask is None and not one,
            scale=scale,
            enable_gqa=group > 1,
        )
    if one and mask.shape[1] == 1:
        q_BKGD = q_BHTD.reshape(len(q_BHTD), -1, group, q_BHTD.shape[3])
        seen_BKGD = F.scaled_dot_product_attention(q_BKGD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)
        return seen_BKGD.reshape(q_BHTD.shape)
    k_BHLD, v_BHLD = (part.repeat_interleave(group, dim=1) for part in (k_BHLD, v_BHLD))
    return F.scaled_dot_product_attention(q_BHTD, k_BHLD, v_BHLD, attn_mask=mask, scale=scale)


def norm(module: Any, x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],), module.weight, module.variance_epsilon)


def gated(both_N2F: Tensor) -> Tensor:
    """SwiGLU: silu of the first half of each row times the second half."""
    gate_NF, up_NF = both_N2F.chunk(2, dim=-1)
    return F.silu(gate_NF).mul_(up_NF)


class Operations:
    """Operations between matrix products: C kernels if they apply, else torch."""

    def __init__(self, weight: Tensor, *, by_kernel: bool) -> None:
        self._kernels = LayerKernels() if by_kernel and applies(weight.dtype, weight.device) else None

    @property
    def by_kernel(self) -> bool:
        return self._kernels is not None

    @property
    def kernels(self) -> LayerKernels:
        """The C kernels. Raises RuntimeError if they do not apply."""
        if self._kernels is None:
            raise RuntimeError("this forward has no C kernels")
        return self._kernels

    def norm(self, module: Any, x_NE: Tensor) -> Tensor:
        if self._kernels is None:
            return norm(module, x_NE)
        return self._kernels.normed(x_NE, module.weight, module.variance_epsilon)

    def gated(self, both_N2F: Tensor) -> Tensor:
        return gated(both_N2F) if self._kernels is None else self._kernels.gate(both_N2F)


class FusedLlama:
    """The forward pass of a whole model. Call `bind` after each change of its weights."""

    def __init__(self, model: Any, *, by_kernel: bool = True) -> None:
        config, inner = model.config, model.model
        self.heads = (config.num_attention_heads, config.num_key_value_heads)
        self._width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self._embedding, self._norm, self._rotary = inner.embed_tokens, inner.norm, inner.rotary_emb
        self._operations = Operations(self._embedding.weight, by_kernel=by_kernel and self._width <= WIDEST)
        self._is_small = sum(parameter.nbytes for parameter in model.parameters()) <= MOST_PACKED
        self._has_steps = self.packs_by_kernel and len(set(epsilons(model))) == 1
        packs = self._is_small and not self._has_steps  # weights are kept twice, not three times
        self._head = MergedLinear([model.lm_head], packs=packs)
        self._layers = [
            FusedLayer(layer, i, self.heads, self._width, self._operations, packs=packs)
            for i, layer in enumerate(inner.layers)
        ]
        self._cos_LD = self._sin_LD = torch.empty(0, 0)
        self._step = self._made_step()

    @property
    def by_kernel(self) -> bool:
        """Whether C kernels compute the operations between matrix products."""
        return self._operations.by_kernel

    @property
    def packs_by_kernel(self) -> bool:
        """Whether C kernels compute the attention of packed prefills."""
        return self.by_kernel and self._operations.kernels.attends

    @property
    def has_two_ways(self) -> bool:
        """Whether decode steps of few rows use one C call, and those of many rows matrix products."""
        return self._step is not None and not self._is_small

    @property
    def device(self) -> torch.device:
        device: torch.device = self._embedding.weight.device
        return device

    def bind(self) -> None:
        """Use the current weights of the model."""
        for layer in self._layers:
            layer.bind()
        self._head.bind()
        self._step = self._made_step()

    def _made_step(self) -> DecodeStep | None:
        """Decode steps in C with the current weights; None if no kernel applies."""
        if not self._has_steps:
            return None
        n_query, n_key = self.heads
        return DecodeStep(
            ModelWeights(
                embedding_VE=self._embedding.weight.data.contiguous(),
                norm_E=self._norm.weight.data,
                head=of_step(self._head, self._is_small),
                layers=tuple(layer.weights(copied=self._is_small) for layer in self._layers),
                n_query=n_query,
                n_key=n_key,
                head_width=self._width,
                scale=self._layers[0].scale,
                epsilon=self._norm.variance_epsilon,
            )
        )

    def decoded(
        self,
        ids: Sequence[int],
        positions: Sequence[int],
        view: CacheView | DecodeBlocks,
        mask: Tensor | None = None,
    ) -> Tensor:
        """(n, V) logits of one more token of each row, at these positions."""
        length = max(positions) + 1
        step = self._step_for(len(ids))
        if step is not None and isinstance(view, DecodeBlocks):
            self.reserve(length)
            return view.decoded(step, ids, self._cos_LD, self._sin_LD)
        ids_n1, position_n1 = (torch.tensor(numbers, device=self.device)[:, None] for numbers in (ids, positions))
        return self(ids_n1, position_n1, length, mask, view)

    def steps_on(self, n: int) -> bool:
        """Whether `decoded_on` serves n rows."""
        step = self._step_for(n)
        return step is not None and step.goes_on

    def decoded_on(
        self, ids: Sequence[int], view: DecodeBlocks, draws: Draws
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Next tokens and log-probs of each row, step by step until a row ends (`DecodeStep.on`)."""
        step = self._step_for(len(ids))
        if step is None:
            raise ValueError(f"several decode steps of {len(ids)} rows cannot run in one call")
        self.reserve(view.n_positions)
        return view.decoded_on(step, ids, self._cos_LD, self._sin_LD, draws)

    def _step_for(self, n: int) -> DecodeStep | None:
        """The C decode step for n rows, or None."""
        return self._step if self._is_small or n <= MANY else None

    def __call__(
        self,
        ids_BT: Tensor,
        position_BT: Tensor,
        length: int,
        mask: Tensor | None,
        view: CacheView | DecodeBlocks,
        keep: Tensor | None = None,
        where: Sequences | None = None,
    ) -> Tensor:
        """(N, V) logits, or those of the tokens `keep`; positions < `length`; `where` stands for the kernels' mask."""
        self.reserve(length)
        cos_BTD, sin_BTD = self._cos_LD[position_BT], self._sin_LD[position_BT]
        if where is None and not isinstance(view, DecodeBlocks):
            sin_BTD[..., : self._width // 2].neg_()
        shape = (ids_BT.shape[0], ids_BT.shape[1])
        call = ForwardCall(shape, cos_BTD[:, :, None], sin_BTD[:, :, None], mask, view, where)
        h_NE = self._embedding(ids_BT.reshape(-1))
        for layer in self._layers:
            h_NE = layer(h_NE, call)
        return self._head(self._operations.norm(self._norm, h_NE if keep is None else h_NE[keep]))

    def reserve(self, length: int) -> int:
        """Compute RoPE angles of at least this many positions; returns the number."""
        if len(self._cos_LD) >= length:
            return len(self._cos_LD)
        at_1L = torch.arange(2 * length, device=self.device)[None]
        cos_1LD, sin_1LD = self._rotary(self._embedding.weight, at_1L)
        self._cos_LD, self._sin_LD = cos_1LD[0].contiguous(), sin_1LD[0].contiguous()
        return len(self._cos_LD)


def of_step(joined: MergedLinear, copied: bool) -> PackedWeights | PlainWeights:
    """A weight in the layout of a decode step."""
    return joined.panels() if copied else joined.plain()


def epsilons(model: Any) -> list[float]:
    """The epsilons of the norms."""
    return [module.variance_epsilon for module in model.modules() if hasattr(module, "variance_epsilon")]


class NoCache:
    """A cache view for a forward pass without a cache."""

    given: GivenTokens | None = None

    def write(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> None:
        """Keeps nothing."""

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int) -> tuple[Tensor, Tensor]:
        return key_states, value_states


def fused(model: Any, *, by_kernel: bool = True) -> FusedLlama | None:
    """The fused forward of a Llama-like model, else None. `by_kernel`: use C kernels if they apply."""
    if type(model).__name__ not in FAMILY or model.config.hidden_act not in ("silu", "swish"):
        return None
    return FusedLlama(model, by_kernel=by_kernel)


@torch.inference_mode()
def disagreement(model: Any, forward: FusedLlama) -> str | None:
    """How the fused forward differs from that of the model; None if it does not."""
    vocabulary, device = model.config.vocab_size, model.lm_head.weight.device
    ids_1T = (torch.arange(PROBE, device=device) * 7919 % vocabulary)[None]
    plain_TV = model(input_ids=ids_1T, use_cache=False).logits[0]
    fast_TV = _whole(forward, ids_1T, NoCache())
    if forward.by_kernel:
        fast_TV[-1] = _decoded(forward, ids_1T)
    if forward.has_two_ways:
        plain_TV = torch.cat([plain_TV, plain_TV[-1:]])
        fast_TV = torch.cat([fast_TV, _decoded(forward, ids_1T, by_call=False)[None]])
    bound = TOLERANCE.get(plain_TV.dtype, ROUGH) * max(1.0, float(plain_TV.abs().max()))
    gap_T = (plain_TV - fast_TV).abs().amax(-1)
    gap_T[0] /= FIRST
    gap = float(gap_T.max())
    return None if gap <= bound else f"logits differ by {gap:.2e}, more than {bound:.1e}"  # NaN differs, too


def _whole(forward: FusedLlama, ids_1T: Tensor, view: CacheView) -> Tensor:
    """(T, V) of one packed forward."""
    n = ids_1T.shape[1]
    where = Sequences.of([n], None, None) if forward.packs_by_kernel else None
    return forward(ids_1T, torch.arange(n, device=ids_1T.device)[None], n, None, view, where=where)


def _decoded(forward: FusedLlama, ids_1T: Tensor, *, by_call: bool = True) -> Tensor:
    """(V) of the last token alone, the others' keys and values in blocks; by one call, if it may be."""
    blocks, n = PagedCache(*forward.heads), ids_1T.shape[1] - 1
    blocks.reserve([n + 1], 0)
    _whole(forward, ids_1T[:, :n], blocks.filling([CachePiece([0], 0, n, 0)]))
    view, mask = blocks.decoding([n], torch.float32, ids_1T.device)
    if by_call:
        return forward.decoded([int(ids_1T[0, n])], [n], view, mask)[0]
    return forward(ids_1T[:, n:], torch.tensor([[n]], device=ids_1T.device), n + 1, mask, view)[0]
