"""Decode steps of a whole model in one C call, which removes the call overhead that dominates small models.

Weights are either packed into a second copy, in the order in which they are read, or read in place.

Shapes: n rows, E width, A channels of a row of queries, keys and values, X queries' channels, G gates, V vocabulary, D
head width, L positions, C blocks of a pool, K key heads, P positions of a block.
"""

import ctypes
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from areal_cpu.build import addresses, alike, function
from areal_cpu.packed_weights import n_floats, panels
from areal_cpu.paged_attention import WIDEST, Cache, Decode
from areal_cpu.sampler import PART

_SIZE, _POINTER = ctypes.c_int64, ctypes.c_void_p


class _Product(ctypes.Structure):
    """A struct of decode_step.c, as the next ones."""

    _fields_ = (
        *((name, _SIZE) for name in ("n_in", "n_out")),
        *((name, _POINTER) for name in ("panels", "weight", "bias")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("first", "second", "query_norm", "key_norm")),
        *((name, _Product) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("far_keys", "far_values", "near_keys", "near_values")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, _SIZE) for name in ("n_layers", "width", "n_gates", "head_width")),
        ("epsilon", ctypes.c_float),
        ("embedding", _POINTER),
        ("norm", _POINTER),
        ("head", _Product),
        ("layers", ctypes.POINTER(_Layer)),
    )


class _Ahead(ctypes.Structure):
    _fields_ = (
        *((name, _SIZE) for name in ("n_steps", "n_stops")),
        *((name, _POINTER) for name in ("stops", "rate", "uniform", "at", "token", "logp", "weight", "part")),
        ("n_done", _SIZE),
    )


@cache
def _decoded() -> Callable[..., None]:
    return function("decoded", _SIZE, ctypes.POINTER(_Model), ctypes.POINTER(Cache), *[_POINTER] * 5)


@cache
def _decoded_on() -> Callable[..., None]:
    pointers = [_POINTER] * 5
    return function(
        "decoded_on", _SIZE, ctypes.POINTER(_Model), ctypes.POINTER(Cache), *pointers, ctypes.POINTER(_Ahead)
    )


class PackedWeights:
    """A weight (F, E), its bias, and a packed copy of the weight."""

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None = None) -> None:
        self._n_out, self._n_in = weight_FE.shape
        self.panels = torch.empty(n_floats(self._n_out, self._n_in))
        self.fill(weight_FE, bias_F)

    def fill(self, weight_FE: Tensor, bias_F: Tensor | None = None) -> None:
        """With another weight of this shape."""
        alike((self._n_out, self._n_in), weight_FE)
        if bias_F is not None:
            alike((self._n_out,), bias_F)
        self._bias_F = bias_F  # kept, as C has addresses alone
        panels(weight_FE, to=self.panels)

    def product(self) -> _Product:
        return _Product(self._n_in, self._n_out, self.panels.data_ptr(), None, _address(self._bias_F))


class PlainWeights:
    """A weight (F, E) and its bias, read in place."""

    def __init__(self, weight_FE: Tensor, bias_F: Tensor | None = None) -> None:
        if bias_F is not None:
            alike((len(weight_FE),), bias_F)
        self._weight_FE, self._bias_F = weight_FE, bias_F  # kept, as C has addresses alone

    def product(self) -> _Product:
        n_out, n_in = self._weight_FE.shape
        return _Product(n_in, n_out, None, _address(self._weight_FE), _address(self._bias_F))


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Of one layer."""

    first_E: Tensor  # scales of the norm before attention
    second_E: Tensor  # and before the gates
    query_D: Tensor | None  # of the norms of each head, where there are some
    key_D: Tensor | None
    qkv: PackedWeights | PlainWeights
    out: PackedWeights | PlainWeights
    gate_up: PackedWeights | PlainWeights  # (2 G, E)
    down: PackedWeights | PlainWeights


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Of a whole model; all norms have one epsilon."""

    embedding_VE: Tensor
    norm_E: Tensor
    head: PackedWeights | PlainWeights
    layers: tuple[LayerWeights, ...]
    n_query: int
    n_key: int
    head_width: int
    scale: float  # of scores
    epsilon: float


@dataclass(frozen=True, slots=True)
class Draws:
    """Sampling parameters and random numbers of some steps of n rows."""

    temperatures: Sequence[float]  # of each row
    uniforms: Sequence[Sequence[float]]  # of each step, of each row
    stop_ids: Collection[int]


class DecodeStep:
    """Decode steps with weights whose addresses stay the same until `bind`."""

    def __init__(self, weights: ModelWeights) -> None:
        """Raises ValueError for shapes that do not fit together."""
        width = weights.head_width
        if width > WIDEST or width % 2:
            raise ValueError(f"the width of a head must be even and at most {WIDEST}: got {width}")
        self._weights = weights
        self._layers = (_Layer * len(weights.layers))()
        for layer, parts in zip(self._layers, weights.layers, strict=True):
            self._describe(layer, parts)
        n_width = weights.embedding_VE.shape[1]
        alike((n_width,), weights.norm_E)
        n_gates = self._layers[0].down.n_in
        self._model = _Model(
            len(self._layers), n_width, n_gates, width, weights.epsilon,
            *addresses(weights.embedding_VE, weights.norm_E), weights.head.product(), self._layers,
        )  # fmt: skip
        _fits(self._model.head, n_width, self._model.head.n_out)
        n_heads = 2 * weights.n_query + 2 * weights.n_key + 2
        self._room_of_row = 2 * n_width + n_heads * width + 3 * n_gates
        self._room = torch.empty(0)

    def __len__(self) -> int:
        """Layers."""
        return len(self._layers)

    @property
    def goes_on(self) -> bool:
        """Whether whatever token is sampled may be the next step's."""
        return int(self._model.head.n_out) <= len(self._weights.embedding_VE)

    def _describe(self, layer: _Layer, parts: LayerWeights) -> None:
        weights = self._weights
        n_width, attn = weights.embedding_VE.shape[1], weights.n_query * weights.head_width
        n_gates = weights.layers[0].down.product().n_in
        alike((n_width,), parts.first_E, parts.second_E)
        layer.first, layer.second = addresses(parts.first_E, parts.second_E)
        if parts.query_D is not None and parts.key_D is not None:
            alike((weights.head_width,), parts.query_D, parts.key_D)
            layer.query_norm, layer.key_norm = addresses(parts.query_D, parts.key_D)
        for name in ("qkv", "out", "gate_up", "down"):
            setattr(layer, name, getattr(parts, name).product())
        _fits(layer.qkv, n_width, attn + 2 * weights.n_key * weights.head_width)
        _fits(layer.out, attn, n_width)
        _fits(layer.gate_up, n_width, 2 * n_gates)
        _fits(layer.down, n_gates, n_width)

    def __call__(
        self,
        ids: Sequence[int],
        decode: Decode,
        cos_LD: Tensor,
        sin_LD: Tensor,
        pools: Sequence[tuple[Tensor, Tensor | None]],
    ) -> Tensor:
        """(n, V) logits after these tokens, whose keys and values go to the pools: (2, C, K, P, D) of each layer, the
        rows' own and, where there is one, the common one.
        """
        arguments, logits_nV = self._arguments(ids, decode, cos_LD, sin_LD, pools)
        _decoded()(*arguments)
        return logits_nV

    def on(
        self,
        ids: Sequence[int],
        decode: Decode,
        cos_LD: Tensor,
        sin_LD: Tensor,
        pools: Sequence[tuple[Tensor, Tensor | None]],
        draws: Draws,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Run several steps, each of which samples a token for each row. Returns tokens and log-probs by row.

        Fewer steps where one draws a stop token: it is the last. Raises ValueError where logits are not numbers.
        """
        n, n_steps = len(ids), len(draws.uniforms)
        if decode.n_steps < n_steps or any(len(numbers) != n for numbers in (draws.temperatures, *draws.uniforms)):
            raise ValueError(f"{n_steps} steps of {n} rows have a temperature and uniform numbers for each, and room")
        arguments, _logits_nV = self._arguments(ids, decode, cos_LD, sin_LD, pools)
        n_words = self._model.head.n_out
        if not self.goes_on:
            raise ValueError(f"a token that is sampled has an embedding: {n_words} logits are more than there are")
        rates = (ctypes.c_float * n)(*[1 / t if t > 0 else 0.0 for t in draws.temperatures])
        stops = (_SIZE * len(draws.stop_ids))(*draws.stop_ids)
        uniforms = (ctypes.c_double * (n * n_steps))(*chain.from_iterable(draws.uniforms))
        tokens, logps = (_SIZE * (n * n_steps))(), (ctypes.c_float * (n * n_steps))()
        room = torch.empty(n_words + -(-n_words // PART))
        weight = addresses(room)[0]
        places = (ctypes.addressof(part) for part in (stops, rates, uniforms))
        drawn = (ctypes.addressof(tokens), ctypes.addressof(logps), weight, weight + 4 * n_words)
        ahead = _Ahead(n_steps, len(stops), *places, decode.cache.at, *drawn)
        _decoded_on()(*arguments, ahead)
        decode.n_steps -= ahead.n_done  # whose positions are further on now
        found, n_drawn = list(tokens[: n * ahead.n_done]), list(logps[: n * ahead.n_done])
        if -1 in found:
            raise ValueError(f"logits are numbers; those of row {found.index(-1) % n} are not")
        return [found[row::n] for row in range(n)], [n_drawn[row::n] for row in range(n)]

    def _arguments(
        self,
        ids: Sequence[int],
        decode: Decode,
        cos_LD: Tensor,
        sin_LD: Tensor,
        pools: Sequence[tuple[Tensor, Tensor | None]],
    ) -> tuple[list[Any], Tensor]:
        """Of `decoded` in decode_step.c; the last is where the logits come, which must live as long as they
        are used.
        """
        weights, n = self._weights, len(ids)
        n_vocabulary = len(weights.embedding_VE)
        if not ids or not 0 <= min(ids) <= max(ids) < n_vocabulary:
            raise ValueError(f"a step has tokens of a vocabulary of {n_vocabulary}: not {ids}")
        alike((min(len(cos_LD), len(sin_LD)), weights.head_width), cos_LD, sin_LD)
        heads = (decode.cache.n_query, decode.cache.n_key)
        if len(decode) != n or decode.n_positions > len(cos_LD) or heads != (weights.n_query, weights.n_key):
            raise ValueError(
                f"{n} tokens of {weights.n_query} and {weights.n_key} heads, within {len(cos_LD)} rotations: there are "
                f"{len(decode)} rows of {heads[0]} and {heads[1]}, up to position {decode.n_positions - 1}"
            )
        for layer, (near, far) in zip(self._layers, pools, strict=True):
            layer.near_keys, layer.near_values, layer.far_keys, layer.far_values = decode.places(
                near, far, weights.head_width
            )
        decode.cache.scale = weights.scale
        room, logits_nV = self._room_for(n, decode), torch.empty(n, self._model.head.n_out)
        places = addresses(cos_LD, sin_LD, room, logits_nV)
        return [n, self._model, decode.cache, (_SIZE * n)(*ids), *places], logits_nV

    def _room_for(self, n: int, decode: Decode) -> Tensor:
        n_needed = n * self._room_of_row + decode.n_scores
        if len(self._room) < n_needed:
            self._room = torch.empty(n_needed * 5 // 4)
        return self._room


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else addresses(tensor)[0]


def _fits(product: _Product, n_in: int, n_out: int) -> None:
    """Checks the shapes, because C does not."""
    if (product.n_in, product.n_out) != (n_in, n_out):
        raise ValueError(f"a product is of {n_in} and gives {n_out}, not of {product.n_in} and {product.n_out}")
