"""Dense KV cache: one row per live sequence, all of one length; rows 0 .. n-1 are live.

Shapes: S slots, H key-value heads, C capacity (positions), D head width. Two views serve as `past_key_values`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from actors.engines.builtin.prefix_cache import GivenKeys, States
from areal_cpu.sequences import CachePiece

STEP = 64  # capacity grows and shrinks by multiples of this many positions


class DenseCache:
    """Preallocated keys and values, (S, H, C, D) a layer; C follows the longest live sequence."""

    def __init__(self, n_slots: int) -> None:
        self.n_slots = n_slots
        self.capacity = STEP
        self.n_made = 0  # number of allocations: unchanged means that no tensor moved
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def reserve(self, lengths: Sequence[int], n_live: int) -> None:
        """Allocate capacity, keeping the first `n_live` rows; shrink if four times too large."""
        length = max(lengths)
        if length <= self.capacity < 4 * max(length, STEP):
            return
        self.capacity = _round(length * 5 // 4)
        for index, (keys, values) in self._layers.items():
            self._layers[index] = (self._resized(keys, n_live), self._resized(values, n_live))

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer; allocated on first use like the given ones (.., H, T, D)."""
        if index not in self._layers:
            self._layers[index] = (self._new(keys), self._new(values))
        return self._layers[index]

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a row to another."""
        for keys, values in self._layers.values():
            keys[target, :, :length] = keys[source, :, :length]
            values[target, :, :length] = values[source, :, :length]

    def drop(self, row: int, last: int, length: int) -> None:
        """Free a row; the last row, with `length` positions, takes its index."""
        if row != last and length:
            self.copy(last, row, length)

    def read(self, row: int, begin: int, end: int) -> States:
        """Keys and values of positions begin .. end of a row."""
        return {
            index: torch.stack([part[row, :, begin:end].transpose(0, 1) for part in both], dim=1)
            for index, both in self._layers.items()
        }

    def filling(self, pieces: Sequence[CachePiece], given: GivenKeys | None = None) -> "FillView":
        """A view that writes the pieces of one packed prefill."""
        return FillView(self, pieces, given)

    def decoding(
        self, positions: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> "tuple[DecodeView, Tensor | None]":
        """A view that writes the next token of rows 0 .. n-1, and the mask if their lengths differ."""
        position_n, longest = torch.tensor(positions, device=device), max(positions) + 1
        mask = decode_mask(positions, dtype, device) if min(positions) + 1 < longest else None
        return DecodeView(self, position_n, longest), mask

    def _new(self, like: Tensor) -> Tensor:
        # zeros: a masked cell enters a product with weight 0, and 0 * NaN is NaN
        self.n_made += 1
        return like.new_zeros(self.n_slots, like.shape[1], self.capacity, like.shape[3])

    def _resized(self, old: Tensor, n_live: int) -> Tensor:
        new, kept = self._new(old), min(self.capacity, old.shape[2])
        new[:n_live, :, :kept] = old[:n_live, :, :kept]
        return new


def decode_mask(
    positions: Sequence[int], dtype: torch.dtype, device: torch.device, *, window: int | None = None
) -> Tensor:
    """(n, 1, 1, L), 0 where the token at its row's position sees a cached one and the least number where not.

    With `window` it sees the last `window` positions, its own included.
    """
    position_n1, at_L = torch.tensor(positions, device=device)[:, None], torch.arange(max(positions) + 1, device=device)
    unseen_nL = at_L > position_n1
    if window is not None:
        unseen_nL |= at_L <= position_n1 - window
    mask_nL = torch.zeros(unseen_nL.shape, dtype=dtype, device=device)
    return mask_nL.masked_fill_(unseen_nL, torch.finfo(dtype).min)[:, None, None]


def _round(length: int) -> int:
    return -(-length // STEP) * STEP


class FillView(Cache):
    """Writes the pieces of one packed prefill into their rows; attention reads the packed sequence itself."""

    def __init__(self, slots: DenseCache, pieces: Sequence[CachePiece], given: GivenKeys | None) -> None:
        super().__init__(layers=[])
        self._slots, self._pieces, self._given = slots, pieces, given

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self._given is not None:
            key_states, value_states = self._given.spread(key_states, value_states, layer_idx)
        keys, values = self._slots.layer(layer_idx, key_states, value_states)
        for piece in self._pieces:
            stop = piece.start + piece.end - piece.begin
            keys[piece.rows, :, piece.start : stop] = key_states[0, :, piece.begin : piece.end]
            values[piece.rows, :, piece.start : stop] = value_states[0, :, piece.begin : piece.end]
        return key_states, value_states


class DecodeView(Cache):
    """Writes one token of rows 0 .. n-1 at its position; attention reads the rows up to the longest."""

    def __init__(self, slots: DenseCache, position_n: Tensor, longest: int) -> None:
        super().__init__(layers=[])
        self._slots, self._position_n, self._longest = slots, position_n, longest
        self._row_n = torch.arange(len(position_n), device=position_n.device)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._slots.layer(layer_idx, key_states, value_states)
        keys[self._row_n, :, self._position_n] = key_states[:, :, 0]
        values[self._row_n, :, self._position_n] = value_states[:, :, 0]
        n = len(self._row_n)
        return keys[:n, :, : self._longest], values[:n, :, : self._longest]
